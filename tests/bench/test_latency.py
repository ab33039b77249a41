"""The benchmark of one image at a time: what it reports, never how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kronattn.bench import latency
from kronattn.cli import main
from kronattn.measure import Comparison, Row, processes, read_comparison
from kronattn.ops import kronecker_attention
from tests.native import native_operators, needs_native
from tests.trained import small_network

RESULTS = Path(__file__).parents[2] / "results"
SMALL = ["bench", "latency", "--size", "32", "--rounds", "2", "--turn-seconds", "0", "--threads", "1"]


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which --threads changes
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_candidates_in_processes_of_their_own(monkeypatch, tmp_path, capsys):
    """One that fails in its process is said in one line; the others keep their figures."""
    monkeypatch.setattr(latency, "_OPERATOR_CASE", {"batch": 1, "channels": 2, "grid": [5, 6]})
    monkeypatch.setattr(latency, "OPERATORS", ("fused attention", "kao_sideways"))
    path = tmp_path / "latency.json"
    arguments = ["--models", "mobilenetv2", "--ways", "eager,operators", "--json", "--output", str(path)]
    assert main([*SMALL, *arguments]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(path.read_text())
    assert shown["environment"]["threads"] == 1
    network, fused, sideways = read_comparison(path).rows
    assert (network.candidate, network.how, network.case) == ("mobilenetv2", "eager", {"batch": 1, "size": 32})
    assert "sideways" in sideways.failed
    for row in (network, fused):
        assert len(row.rounds_ms) == len(row.cpu_rounds_ms) == 2
        assert row.time_ms > 0
        assert row.cpu_ms > 0


def test_every_run_has_new_processes(monkeypatch, capsys):
    monkeypatch.setattr(latency, "_OPERATOR_CASE", {"batch": 1, "channels": 2, "grid": [5, 6]})
    monkeypatch.setattr(latency, "OPERATORS", ("fused attention",))
    started = []
    worker = processes._Worker
    monkeypatch.setattr(processes, "_Worker", lambda *of: started.append(of) or worker(*of))
    assert main([*SMALL, "--ways", "operators", "--repeats", "3", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert len(started) == 3
    assert len(row["rounds_ms"]) == len(row["cpu_rounds_ms"]) == 3
    assert row["time_ms"] == sorted(row["rounds_ms"])[1]


@pytest.mark.parametrize("how", ["fused", "onnxruntime", "int8"])
def test_every_way_gives_what_the_network_gives(how, monkeypatch):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    monkeypatch.setattr(latency, "build_network", small_network)
    run = latency.network_form("kanet_kv", how, threads=1, batch=1, size=64)
    images = torch.randn((1, 3, 64, 64), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        found, expected = run(), latency._settled("kanet_kv")(images)
    assert (found - expected).norm() < {"int8": 0.05}.get(how, 1e-4) * expected.norm()


def test_operators_are_those_of_the_package():
    run = latency.operator_call("kao_qkv", "operators", threads=1, batch=1, channels=2, grid=[5, 6])
    x = torch.randn((1, 2, 5, 6), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(run(), kronecker_attention(x, mode="qkv"))


def test_table_of_rounds():
    """Ratios are taken within a round; operators have a base of their own."""
    case, operators = {"batch": 1, "size": 32}, {"batch": 8, "channels": 8, "grid": [56, 56]}
    rows = [
        Row("mobilenetv2", case, time_ms=2.0, rounds_ms=[1.0, 4.0], cpu_ms=4.0, cpu_rounds_ms=[2.0, 8.0]),
        Row("kanet_kv", case, time_ms=3.0, rounds_ms=[2.0, 4.0], cpu_ms=5.0, cpu_rounds_ms=[4.0, 8.0]),
        Row("kanet_qkv", case, failed="no such kernel"),
        Row("fused attention", operators, how="operators", time_ms=40.0, rounds_ms=[40.0, 40.0]),
        Row("kao_kv", operators, how="operators", time_ms=1.0, rounds_ms=[1.0, 1.0]),
    ]
    found = Comparison("latency", "mobilenetv2", rows, environment={"threads": 1})
    table = latency.latency_table(found)
    assert table.title == "Latency on the CPU, batch 1, 32×32, threads: 1"
    cells = [[cell.text for cell in row] for row in table.rows]
    assert cells[0] == ["mobilenetv2", "2.00", "1.00", "1.00", "4.00", "1.00"]
    assert cells[1] == ["kanet_kv", "3.00", "1.50 (1.25–1.75)", "1.00", "5.00", "1.50 (1.25–1.75)"]
    assert cells[3] == ["kao_kv", "1.00", "1/40 (1/40–1/40)", "–", "–", "–"]
    assert table.notes[-1] == "Left out: kanet_qkv, eager (no such kernel)."


def test_files_that_kept_no_rounds_keep_their_ratios():
    table = latency.latency_table(read_comparison(RESULTS / "latency-2-threads-before.json"))
    kanet = next(row for row in table.rows if row[0].text == "kanet_kv")
    assert [cell.text for cell in kanet][-4:] == ["1.12 (1.07–1.16)", "1.00", "52.4", "1.13 (1.07–1.19)"]


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("latency", ["--models", "kanet_zz"], "unknown network 'kanet_zz'"),
        ("latency", ["--ways", "jax"], "--ways must be eager or fused"),
        ("export", ["--models", "kanet_zz"], "unknown network 'kanet_zz'"),
        ("export", ["--runtimes", "jax"], "--runtimes must be eager or compiled or onnxruntime"),
    ],
)
def test_bad_input(command, options, message, capsys):
    assert main(["bench", command, *options]) == 2
    assert message in capsys.readouterr().err


def test_export_is_latency_with_other_defaults(monkeypatch, capsys):
    asked = {}

    def bench_latency(names, ways, **options):
        asked.update(options, names=names, ways=ways)
        return Comparison("latency", "mobilenetv2", environment={"threads": 1})

    monkeypatch.setattr(latency, "bench_latency", bench_latency)
    assert main(["bench", "export", "--runtimes", "eager,onnxruntime", "--seconds", "6", "--json"]) == 0
    assert asked["names"] == ["mobilenetv2", "kanet_kv", "kanet_qkv"]
    assert asked["ways"] == ["eager", "onnxruntime"]
    assert asked["turn_seconds"] * asked["rounds"] == pytest.approx(1)
    assert json.loads(capsys.readouterr().out)["kind"] == "latency"


@needs_native
@pytest.mark.usefixtures(native_operators.__name__)
def test_with_compiled_operators_and_without(monkeypatch, capsys):
    monkeypatch.setattr(latency, "_OPERATOR_CASE", {"batch": 1, "channels": 2, "grid": [5, 6]})
    assert main([*SMALL, "--ways", "operators,operators-native", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["how"] for row in rows] == ["operators"] * 3 + ["operators-native"] * 3
    assert not any("failed" in row for row in rows)
    assert latency.default_ways() == latency.WAYS


def test_compiled_operators_that_are_not_there(capsys):
    assert not any("native" in way for way in latency.default_ways())
    assert main([*SMALL, "--ways", "fused-native"]) == 2
    message = "the ways that end in -native cannot be measured: the environment's KRONATTN_NATIVE=0 switches it off"
    assert message in " ".join(capsys.readouterr().err.split())
