"""Tables 3 to 5."""

from __future__ import annotations

import json

import pytest
from torch import nn

from kronattn.cli import main
from kronattn.tables.networks import ROWS, count_parameters, measure_networks, network_tables, to_json
from tests.models.test_kanet import EXACT


@pytest.fixture(scope="module")
def measured():
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    pytest.importorskip("timm", reason="timm is not installed")
    return measure_networks()


def test_rows_are_the_paper_s():
    counts = {table: sum(row.table == table for row in ROWS) for table in (3, 4, 5)}
    assert counts == {3: 11, 4: 5, 5: 4}


def test_exact_figures(measured):
    for found in measured:
        if found.row.name in EXACT:
            assert (found.params_without_bn, found.madd) == EXACT[found.row.name]
        if found.row.paper is None:
            continue
        # Within the digits that are printed, cut off or rounded; or a footnote says why not.
        if not found.row.note:
            for ours, printed in (
                (found.params_without_bn, found.row.paper.params),
                (found.madd, found.row.paper.madd),
            ):
                assert abs(ours - printed) <= 0.01 * printed + 1e4, found.row.name


def test_the_row_that_does_not_follow_is_explained(measured):
    row = next(found for found in measured if found.row.name == "kanet_without_kao")
    assert "repeat the row of MobileNetV2+KAO" in row.row.note
    twin = next(r for r in ROWS if r.name == "mobilenetv2_kao")
    assert (row.row.paper.params, row.row.paper.madd) == (twin.paper.params, twin.paper.madd)


@pytest.mark.parametrize("table", [3, 4])
def test_both_forms_of_kao_qkv_cost_the_same_and_the_printed_one_has_the_printed_figures(measured, table):
    once, printed = (
        next(found for found in measured if (found.row.table, found.row.name) == (table, name))
        for name in ("kanet_qkv", "kanet_qkv_as_printed")
    )
    assert (once.params, once.madd) == (printed.params, printed.madd)
    assert once.row.paper is None
    assert (printed.row.paper.top1, printed.row.paper.madd) == (0.728, 281e6)


def test_libraries_own_counts(measured):
    import torchvision

    ours = {found.row.name: found.params for found in measured}
    for name, weights in {
        "vgg16": "VGG16",
        "alexnet": "AlexNet",
        "squeezenet": "SqueezeNet1_0",
        "googlenet": "GoogLeNet",
    }.items():
        documented = getattr(torchvision.models, f"{weights}_Weights").DEFAULT.meta["num_params"]
        assert ours[name] == documented, name
    assert ours["mobilenetv2"] == torchvision.models.MobileNet_V2_Weights.DEFAULT.meta["num_params"]


def test_notes_are_numbered_in_the_table(measured):
    (third, fourth, fifth) = network_tables(measured)
    marks = [row[0].text for row in fifth.groups[0].rows]
    assert marks[-1] == "KANet w/o KAO [1]"
    assert any(note.startswith("[1] KANet w/o KAO") for note in fifth.notes)
    assert len(third.groups[0].rows) == 11
    assert [note[:14] for note in fourth.notes if note.startswith("[")] == ["[1] KANet_QKV:"]


def test_json(measured, capsys):
    assert main(["tables", "networks", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(to_json(measured)))
    assert set(printed["rows"][0]) >= {"table", "name", "params", "params_without_bn", "madd", "paper", "note"}
    assert set(printed["rows"][0]["paper"]) == {"top1", "params", "madd"}


def test_count_parameters_leaves_out_every_batch_norm():
    model = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm2d(5), nn.GroupNorm(1, 4)))
    assert count_parameters(model) == (9 + 6 + 10 + 8, 9 + 8)
