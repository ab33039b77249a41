"""Table 2: the figures that must come out to the digit, and how the table treats what it cannot run."""

from __future__ import annotations

import math

import pytest
import torch

from kronattn.measure import count_madd
from kronattn.nn import DenseAttention
from kronattn.present import format_percent
from kronattn.tables.operators import peers
from kronattn.tables.operators.candidates import (
    OPERATORS,
    Case,
    FusedAttention,
    MappedAttention,
    MaterialisedAttention,
    with_map,
)
from kronattn.tables.operators.printed import PRINTED
from kronattn.tables.operators.table import draw_operators, measure_operators, operator_tables

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
    x = torch.empty(1, case.channels, *case.grid, device="meta")
    madd = count_madd(OPERATORS[operator].build(8).eval(), OPERATORS[operator].input_of(x))
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
    built = MaterialisedAttention(8, pool=pool).double()
    dense = DenseAttention(8, pool=pool, project="v", coefficient_norm=None).double().eval()
    dense.load_state_dict(built.state_dict())
    torch.testing.assert_close(built(x), dense(x))


def test_fused_attention_is_built_attention():
    x = torch.randn(2, 8, 7, 9, dtype=torch.float64)
    built, fused = MaterialisedAttention(8).double(), FusedAttention(8).double()
    fused.load_state_dict(built.state_dict())
    rows = OPERATORS["attn_fused"].input_of(x)
    assert rows.is_contiguous()
    torch.testing.assert_close(fused(rows).squeeze(1).transpose(1, 2), built(x).flatten(2))


@pytest.fixture(scope="module")
def measured():
    return measure_operators([Case((14, 14)), Case((4, 8, 8))], seconds=0.05)


def test_rows_of_every_operator(measured):
    assert [(row.case["grid"], row.candidate) for row in measured.measured] == [
        (grid, operator) for grid in ([14, 14], [4, 8, 8]) for operator in with_map()
    ]
    for row in measured.rows:
        baseline = measured.find("attn", row)
        assert measured.ratio(row).value == pytest.approx(baseline.time_ms / row.time_ms)
        assert measured.share(row, figure="memory_bytes") == pytest.approx(row.memory_bytes / baseline.memory_bytes)
        assert row.quartiles_ms[0] <= row.time_ms <= row.quartiles_ms[1]


def test_memory_of_built_attention_is_two_matrices_the_values_and_the_output(measured):
    built = next(row for row in measured.rows if row.candidate == "attn")
    matrix, values = 8 * 196 * 196 * 4, 8 * 8 * 196 * 4
    # Logits and coefficients at the peak; the values come after the logits are gone.
    assert built.memory_bytes == 2 * matrix
    kao = next(row for row in measured.rows if row.candidate == "kao_qkv")
    assert values < kao.memory_bytes < matrix / 10


def test_memory_at_the_papers_largest_size():
    from kronattn.measure import peak_memory

    x = torch.randn(8, 8, 56, 56)
    output = x.numel() * 4
    for operator, allowed in (("kao_kv", 4_000_000), ("kao_qkv", 300_000)):
        module = OPERATORS[operator].build(8).eval()
        assert output < peak_memory(lambda module=module: module(x)) <= output + allowed


def test_a_map_on_the_output_is_one_on_the_values():
    x = torch.randn(2, 8, 7, 9, dtype=torch.float64)
    built, mapped = MaterialisedAttention(8).double(), MappedAttention(peers.regular, 8).double()
    mapped.load_state_dict(built.state_dict())
    torch.testing.assert_close(mapped(x), built(x))


def test_what_does_not_fit_is_left_out_and_named():
    measured = measure_operators([Case((14, 14))], seconds=0.01, budget=1_000_000)
    assert [row.candidate for row in measured.measured] == with_map()[1:]
    assert [(row.candidate, row.failed) for row in measured.rows if row.failed] == [
        ("attn", "would need 0.0 GB, more than 0.0 GB of memory")
    ]
    assert all(measured.ratio(row) is None for row in measured.rows)
    assert all(measured.ratio(row, "attn_fused") is not None for row in measured.measured)
    (table,) = operator_tables(measured)
    assert any("Attn at 8×14²×8" in note for note in table.notes)
    assert "Speed-up" not in [column.title for column in table.columns]


def test_what_would_take_too_long_is_left_out():
    measured = measure_operators([Case((4, 4)), Case((14, 14))], seconds=0.01, longest_call=0.0)
    assert {tuple(row.case["grid"]) for row in measured.measured} == {(4, 4)}
    left_out = [row for row in measured.rows if row.failed]
    assert {row.candidate for row in left_out} == set(with_map())
    assert "for a call" in left_out[0].failed


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
    figure = draw_operators(measured)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == [OPERATORS[name].label for name in with_map()] + ["the paper's values", "other grids (4×8×8)"]
    time = figure.axes[0]
    assert (time.get_xscale(), time.get_yscale()) == ("log", "log")
    crosses = [line for line in time.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert sorted(float(line.get_ydata()[0]) for line in crosses) == [0.8, 1.7, 2.0, 5.8]
