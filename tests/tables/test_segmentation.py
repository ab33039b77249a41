"""Table 6: what the paper prints, what is counted, and how the table treats what it cannot run."""

from __future__ import annotations

import json

import pytest
import torch

from kronattn.cli import main
from kronattn.nn import DenseSegmentationHead
from kronattn.tables.segmentation.candidates import HEADS, Case, MaterialisedSegmentationHead
from kronattn.tables.segmentation.heads import draw_heads, head_table, measure_heads
from kronattn.tables.segmentation.networks import count_networks
from kronattn.tables.segmentation.printed import PRINTED, read_results

SMALL = ["tables", "segmentation", "--backbone", "kanet_kv", "--sizes", "33,65", "--seconds", "0.01"]
TINY = Case(33, batch=2, channels=16, num_classes=3)


def test_the_paper_s_values():
    assert {name: (row.pixel_accuracy, row.mean_iou) for name, row in PRINTED.items()} == {
        "deeplabv2_aspp": (0.944, 0.751),
        "deeplabv2_attn": (0.947, 0.763),
        "deeplabv2_kao_kv": (0.946, 0.759),
        "deeplabv2_kao_qkv": (0.946, 0.758),
    }
    assert {head.network for head in HEADS.values()} == set(PRINTED)


def test_exact_figures():
    pytest.importorskip("torchvision", reason="torchvision is not installed")
    found = {row.network: row for row in count_networks([321])}
    backbone = 42_500_160  # torchvision's ResNet-101 without its classifier
    heads = {"deeplabv2_aspp": 1_548_372} | dict.fromkeys(list(PRINTED)[1:], 3_199_510)
    for network, row in found.items():
        assert (row.params, row.head_params) == (backbone + heads[network], heads[network])
    madd = {network: row.madd[321] for network, row in found.items()}
    # The backbone is the same for all, so differences are those of the heads; see test_deeplab for these by hand.
    m, n, c, w, k = 41**2, 82, 2048, 512, 21
    regular = 3 * m * c * w + 2 * m * m * w + m * w * k
    rows_and_columns = 3 * n * c * w + n * w * k + n * n * (w + k)
    assert madd["deeplabv2_attn"] - madd["deeplabv2_kao_qkv"] == regular - rows_and_columns
    assert madd["deeplabv2_kao_kv"] - madd["deeplabv2_kao_qkv"] == n * (m * (c + k) - n * (w + k))


def test_materialised_attention_is_dense_attention():
    torch.manual_seed(0)
    built, dense = MaterialisedSegmentationHead(16, 3).double(), DenseSegmentationHead(16, 3).double()
    dense.load_state_dict(built.state_dict())
    x = torch.randn(2, 16, 7, 9, dtype=torch.float64)
    for mode in (True, False):
        torch.testing.assert_close(built.train(mode)(x), dense.train(mode)(x))


class TestMeasurement:
    def test_rows(self):
        costs = measure_heads([TINY], works=("inference", "training"), with_resize=True, seconds=0.01)
        assert [(row.candidate, row.work) for row in costs.rows] == [
            (head, work) for work in ("inference", "training") for head in (*HEADS, "resize")
        ]
        for row in costs.rows:
            assert row.memory_bytes > 0
            assert row.time_ms > 0
        training, inference = (
            next(r.memory_bytes for r in costs.rows if (r.candidate, r.work) == ("attn", work))
            for work in ("training", "inference")
        )
        assert training > inference  # it keeps what the backward pass needs

    def test_what_needs_too_much_memory_is_left_out(self):
        costs = measure_heads([TINY, Case(321, channels=16)], seconds=0.01, budget=2_000_000)
        left_out = [row for row in costs.rows if row.failed]
        assert [(row.candidate, row.case["size"]) for row in left_out] == [("attn", 321)]
        assert left_out[0].failed == "would need 0.0 GB, more than 0.0 GB"
        assert all(costs.ratio(row) is None for row in costs.rows if row.case["size"] == 321)
        assert any(note.startswith("Left out: Attn at 321²") for note in head_table(costs).notes)

    def test_nothing_but_memory_decides(self):
        costs = measure_heads([Case(1025, channels=2048)], ["attn"], budget=10**9)
        assert costs.measured == []

    def test_unknown_head(self):
        with pytest.raises(ValueError, match="unknown head 'psp': known are aspp, attn, "):
            measure_heads([TINY], ["psp"])
        with pytest.raises(ValueError, match="--how graphs is for CUDA devices"):
            measure_heads([TINY], ["attn"], hows=("graphs",), device="cpu")

    def test_half_precision_and_layout(self):
        costs = measure_heads(
            [TINY], works=("inference", "training"), dtype=torch.bfloat16, channels_last=True, seconds=0.01
        )
        assert len(costs.rows) == 2 * len(HEADS)

    def test_figure(self):
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
        figure = draw_heads(measure_heads([TINY, Case(65, channels=16)], seconds=0.01))
        assert len(figure.axes[0].lines) == len(HEADS)


class TestResults:
    def write(self, path, rows):
        path.write_text(json.dumps({"runs": rows}))
        return path

    def test_mean_over_runs(self, tmp_path):
        rows = [
            {"model": "deeplabv2_kao_kv", "seed": seed, "pixel_accuracy": 0.8 + seed / 10, "mean_iou": 0.5}
            for seed in (0, 1)
        ]
        found = read_results(self.write(tmp_path / "camvid.json", rows))
        assert found["deeplabv2_kao_kv"].pixel_accuracy == pytest.approx(0.85)
        assert found["deeplabv2_kao_kv"].runs == 2

    @pytest.mark.parametrize("content", ["no json", "[]", '{"runs": [{"model": "x"}]}'])
    def test_other_files(self, tmp_path, content):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ValueError, match="x.json does not hold the results of segmentation runs"):
            read_results(tmp_path / "x.json")


class TestCommand:
    def test_tables(self, capsys, tmp_path, monkeypatch):
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
        monkeypatch.chdir(tmp_path)
        target = tmp_path / "heads.svg"
        assert main([*SMALL, "--output", str(target)]) == 0
        out = capsys.readouterr().out
        for text in ("Table 6", "KAO_QKV", "0.944", "76.3", "1,871,344", "85,222", "What the heads cost"):
            assert text in out
        assert b"<svg" in target.read_bytes()

    def test_json_with_results(self, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "results").mkdir()
        rows = [{"model": "deeplabv2_aspp", "seed": 0, "pixel_accuracy": 0.9, "mean_iou": 0.6}]
        TestResults().write(tmp_path / "results" / "camvid.json", rows)
        assert main([*SMALL, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [row["network"] for row in found["rows"]] == list(PRINTED)
        assert found["rows"][0]["camvid"] == {"pixel_accuracy": 0.9, "mean_iou": 0.6, "runs": 1}
        assert found["rows"][1]["camvid"] is None
        assert [(row["candidate"], row["case"]["size"]) for row in found["heads"]["rows"]] == [
            (h, s) for s in (33, 65) for h in HEADS
        ]
        assert found["heads"]["environment"]["torch"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--backbone", "resnet99"], "unknown backbone 'resnet99'"),
            (["--sizes", "a,b"], "sizes must be whole numbers from 1 up"),
            (["--sizes", "0"], "sizes must be whole numbers from 1 up"),
            (["--device", "abacus"], "device must be auto, cpu, cuda or mps"),
            (["--memory-budget", "0"], "--memory-budget must be positive"),
            (["--results", "nowhere.json"], "there is no file nowhere.json"),
            (["--output", "figure.pdf"], "--output must end in .png or .svg"),
        ],
    )
    def test_bad_input(self, arguments, message, capsys):
        assert main([*SMALL, *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert message in captured.err


def test_results_are_looked_for_where_compare_leaves_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_results() == {}
    (tmp_path / "results").mkdir()
    run = {"model": "deeplabv2_attn", "pixel_accuracy": 0.9, "mean_iou": 0.6}
    (tmp_path / "results" / "camvid.json").write_text(json.dumps({"runs": [run, {**run, "mean_iou": 0.8}]}))
    assert read_results()["deeplabv2_attn"].mean_iou == pytest.approx(0.7)
    assert read_results()["deeplabv2_attn"].runs == 2
