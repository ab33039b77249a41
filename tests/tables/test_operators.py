"""Table 2: the figures that must come out to the digit, and how the table treats what it cannot run."""

from __future__ import annotations

import json
import math

import pytest
import torch

from kronattn.nn import DenseAttention
from kronattn.tables.operators import (
    OPERATORS,
    PRINTED,
    Case,
    draw_operators,
    measure_operators,
    operator_tables,
    to_json,
)
from kronattn.tables.operators.candidates import BuiltAttention, FusedAttention
from kronattn.tables.operators.measurement import _madd_of_one_sample
from kronattn.tables.rendering import format_percent

MADD = {
    "attn": (627_200, 9_884_672, 157_552_640),
    "attn_pool": (156_800, 2_471_168, 39_388_160),
    "attn_fused": (627_200, 9_884_672, 157_552_640),
    "kao_kv": (89_600, 706_048, 5_626_880),
    "kao_qkv": (14_336, 53_760, 207_872),
    "kao_qkv_as_printed": (14_336, 53_760, 207_872),
}
NOT_IN_THE_PAPER = ("attn_fused", "kao_qkv")


@pytest.mark.parametrize(("at", "size"), [(0, 14), (1, 28), (2, 56)])
@pytest.mark.parametrize("operator", MADD)
def test_multiply_adds_and_savings_of_the_paper(operator, at, size):
    case = Case((size, size))
    madd = _madd_of_one_sample(operator, case)
    assert madd == MADD[operator][at]
    if operator not in NOT_IN_THE_PAPER:
        printed = PRINTED[(size, size), operator]
        assert format_percent(1 - madd / MADD["attn"][at]) == printed["cost_saving"]
        # The paper sometimes rounds and sometimes cuts off: 5,626,880 is printed as 5.62m.
        cut_off, rounded = math.floor(madd / 1e4) / 100, round(madd / 1e6, 2)
        assert printed["madd"] in (f"{cut_off:.2f}m", f"{rounded:.2f}m")


def test_forms_of_kao_qkv_are_what_their_names_say():
    x = torch.full((1, 8, 4, 5), 3.0)
    outputs = {}
    for name in ("kao_qkv", "kao_qkv_as_printed"):
        module = OPERATORS[name].build(8).eval()
        torch.nn.init.eye_(module.value_map.weight)
        outputs[name] = module(x)
    torch.testing.assert_close(outputs["kao_qkv"], x)
    torch.testing.assert_close(outputs["kao_qkv_as_printed"], 2 * x)


@pytest.mark.parametrize("pool", [None, 2])
@pytest.mark.parametrize("grid", [(7, 9), (3, 4, 5)])
def test_built_attention_is_dense_attention(pool, grid):
    x = torch.randn(2, 8, *grid, dtype=torch.float64)
    built = BuiltAttention(8, pool=pool).double()
    dense = DenseAttention(8, pool=pool, project="v", coefficient_norm=None).double().eval()
    dense.load_state_dict(built.state_dict())
    torch.testing.assert_close(built(x), dense(x))


def test_fused_attention_is_built_attention():
    x = torch.randn(2, 8, 7, 9, dtype=torch.float64)
    built, fused = BuiltAttention(8).double(), FusedAttention(8).double()
    fused.load_state_dict(built.state_dict())
    rows = OPERATORS["attn_fused"].input_of(x)
    assert rows.is_contiguous()
    torch.testing.assert_close(fused(rows).squeeze(1).transpose(1, 2), built(x).flatten(2))


@pytest.fixture(scope="module")
def measured():
    return measure_operators([Case((14, 14)), Case((4, 8, 8))], seconds=0.05)


def test_rows_of_every_operator(measured):
    assert [(row.case.grid, row.operator) for row in measured.rows] == [
        (grid, operator) for grid in ((14, 14), (4, 8, 8)) for operator in OPERATORS
    ]
    assert not measured.left_out
    for row in measured.rows:
        baseline = next(one for one in measured.rows if one.case == row.case and one.operator == "attn")
        assert row.speedup == pytest.approx(baseline.time_ms / row.time_ms)
        assert row.memory_saving == pytest.approx(1 - row.memory_bytes / baseline.memory_bytes)


def test_memory_of_built_attention_is_two_matrices_the_values_and_the_output(measured):
    built = next(row for row in measured.rows if row.operator == "attn")
    matrix, values = 8 * 196 * 196 * 4, 8 * 8 * 196 * 4
    # Logits and coefficients at the peak; the values come after the logits are gone.
    assert built.memory_bytes == 2 * matrix
    kao = next(row for row in measured.rows if row.operator == "kao_qkv")
    assert values < kao.memory_bytes < matrix / 10


def test_memory_at_the_papers_largest_size():
    from kronattn.measure import peak_memory

    x = torch.randn(8, 8, 56, 56)
    output = x.numel() * 4
    for operator, allowed in (("kao_kv", 4_000_000), ("kao_qkv", 300_000)):
        module = OPERATORS[operator].build(8).eval()
        assert output < peak_memory(lambda module=module: module(x)) <= output + allowed


def test_json_schema(measured):
    payload = json.loads(json.dumps(to_json(measured)))
    assert set(payload) == {"rows", "left_out", "environment"}
    for row in payload["rows"]:
        assert {
            "batch",
            "grid",
            "channels",
            "operator",
            "madd",
            "memory_bytes",
            "time_ms",
            "speedup",
            "speedup_over_fused",
            "paper",
        } <= set(row)
        assert (row["batch"], row["channels"]) == (8, 8)
        assert row["operator"] in OPERATORS
        assert row["time_ms_quartiles"][0] <= row["time_ms"] <= row["time_ms_quartiles"][1]
        in_paper = row["grid"] == [14, 14] and row["operator"] not in NOT_IN_THE_PAPER
        assert (row["paper"] is not None) == in_paper
        if in_paper:
            assert set(row["paper"]) == {"madd", "cost_saving", "memory", "memory_saving", "time", "speedup"}


def test_what_does_not_fit_is_left_out_and_named():
    measured = measure_operators([Case((14, 14))], seconds=0.01, memory_budget=1_000_000)
    assert [row.operator for row in measured.rows] == list(OPERATORS)[1:]
    assert [(one.operator, one.reason) for one in measured.left_out] == [
        ("attn", "would need 0.0 GB, more than 0.0 GB of memory")
    ]
    assert all(row.speedup is None and row.memory_saving is None for row in measured.rows)
    assert all(row.cost_saving is not None and row.speedup_over_fused is not None for row in measured.rows)
    (table,) = operator_tables(measured)
    assert any("Attn at 8×14²×8" in note for note in table.notes)
    assert "Speed-up" not in [column.title for column in table.columns]


def test_what_would_take_too_long_is_left_out():
    measured = measure_operators([Case((4, 4)), Case((14, 14))], seconds=0.01, longest_call=0.0)
    assert {row.case.grid for row in measured.rows} == {(4, 4)}
    assert {one.operator for one in measured.left_out} == set(OPERATORS)
    assert "for a call" in measured.left_out[0].reason


def test_tables_show_ours_beside_the_printed(measured):
    paper, beyond = operator_tables(measured)
    assert [group.title for group in paper.groups] == ["8×14²×8"]
    assert [group.title for group in beyond.groups] == ["8×4×8×8×8"]
    titles = [column.title for column in paper.columns]
    rows = {row[0].text: row for row in paper.groups[0].rows}
    madd = rows["KAO_QKV printed"][titles.index("MAdd")]
    assert (madd.text, madd.printed) == ("14,336", "0.01m")
    assert rows["KAO_QKV"][titles.index("MAdd")].text == "14,336"
    assert not any(cell.printed for name in ("Fused", "KAO_QKV") for cell in rows[name])


def test_figure_shows_every_operator_measured_and_printed(measured):
    figure = draw_operators(measured.rows)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [operator.label for operator in OPERATORS.values()] + ["as printed", "other grids"]
    time = figure.axes[0]
    assert (time.get_xscale(), time.get_yscale()) == ("log", "log")
    crosses = [line for line in time.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert sorted(float(line.get_ydata()[0]) for line in crosses) == [0.8, 1.7, 2.0, 5.8]
