"""The benchmark of one image at a time: what it reports, never how fast anything is."""

from __future__ import annotations

import json
import multiprocessing

import pytest
import torch

from kronattn.bench import latency
from kronattn.cli import main
from tests.trained import small_network

SMALL = ["bench", "latency", "--size", "64", "--rounds", "2", "--turn-seconds", "0", "--threads", "1"]


class InProcess(latency._Worker):
    """A worker without a process: what it runs is what a process would."""

    def __init__(self, name, way, settings):
        self._call = latency._operator(name) if way == "operators" else latency._call(name, way, settings)

    def take_turn(self):
        with torch.inference_mode():
            return latency._one_turn(self._call, 0)

    def stop(self):
        pass


def test_rows_and_file(monkeypatch, tmp_path, capsys):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    monkeypatch.setattr(latency, "_Worker", InProcess)
    monkeypatch.setattr(latency, "create_model", small_network)
    monkeypatch.setattr(latency, "_OPERATOR_SHAPE", (1, 2, 5, 6))
    path, ways = tmp_path / "latency.json", ["eager", "fused", "onnxruntime", "int8", "operators"]
    assert main([*SMALL, "--models", "kanet_kv", "--ways", ",".join(ways), "--json", "--output", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(path.read_text())
    networks = [(network, way) for way in ways[:-1] for network in ("mobilenetv2", "kanet_kv")]
    assert [(row["network"], row["way"]) for row in found["rows"]] == [
        *networks,
        *((name, "operators") for name in latency.OPERATORS),
    ]
    for row in found["rows"]:
        assert row["milliseconds"] > 0
        assert row["over_base_quartiles"][0] <= row["over_base"] <= row["over_base_quartiles"][1]
        if row["network"] in (latency.BASE, latency.OPERATORS[0]):
            assert row["over_base"] == 1
    assert found["settings"]["rounds"] == 2
    assert found["environment"]["onnxruntime"]


def test_a_candidate_in_a_process_of_its_own():
    worker = latency._Worker("kao_qkv", "operators", latency.Settings(threads=1, turn_seconds=0))
    try:
        wall, cpu = worker.take_turn()
        assert wall > 0
        assert cpu > 0
    finally:
        worker.stop()


def test_what_a_process_trips_over_is_told_to_its_parent():
    ours, theirs = multiprocessing.Pipe()
    latency._serve(theirs, "kao_sideways", "operators", latency.Settings(threads=torch.get_num_threads()))
    answer = ours.recv()
    assert isinstance(answer, ValueError)
    assert "sideways" in str(answer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "kanet_zz"], "unknown network 'kanet_zz'"),
        (["--ways", "jax"], "--ways must be eager or fused"),
    ],
)
def test_bad_input(options, message, capsys):
    assert main([*SMALL, *options]) == 2
    assert message in capsys.readouterr().err
