"""What is captured, when, and what happens where it cannot be; the capture itself needs a GPU (test_on_gpu.py)."""

import logging

import pytest
import torch

from kronattn.training import graphs
from kronattn.training.compiling import compile_mode, keep_compiled_code, steps_on_device
from kronattn.training.graphs import WARM_UP, CannotGoOn, Captured
from kronattn.training.recipe import Recipe

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class Graph:
    """Repeats a function on the same tensors, as a CUDA graph does, and writes to the same output."""

    def __init__(self, function, places):
        self.function, self.places = function, places
        self.output = torch.zeros(2)
        self.replays = 0

    def replay(self):
        self.replays += 1
        self.output.copy_(self.function(*self.places))


@pytest.fixture
def fakes(monkeypatch):
    """A machine with a GPU, as far as this file goes."""
    made = []

    def capture(function, places):
        made.append(Graph(function, places))
        return made[-1], made[-1].output

    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(graphs, "_on_side_stream", lambda function, inputs, device: function(*inputs))
    monkeypatch.setattr(graphs, "_watched", lambda function, inputs, device: (function(*inputs), None))
    return made


def test_the_first_calls_are_ordinary_and_the_rest_are_repetitions(fakes):
    seen = []

    def function(x):
        seen.append(x.tolist())
        return 2 * x

    captured = Captured(function, CPU)
    outputs = [captured(torch.tensor([float(n), 1.0])) for n in range(WARM_UP + 3)]
    assert [output.tolist() for output in outputs] == [[2.0 * n, 2.0] for n in range(WARM_UP + 3)]
    assert seen == [[float(n), 1.0] for n in range(WARM_UP + 3)]
    (graph,) = fakes
    assert graph.replays == 3
    assert captured.captured


def test_two_kinds_of_input_have_graphs_and_others_run_as_they_are(fakes):
    captured = Captured(lambda x: x[:2] + 1, CPU)
    for n in range(WARM_UP + 2):
        for length in (4, 3, 5):
            assert captured(torch.full((length,), float(n))).tolist() == [n + 1.0, n + 1.0]
    assert [graph.replays for graph in fakes] == [2, 2]
    assert [graph.places[0].shape for graph in fakes] == [(4,), (3,)]


def test_a_function_that_waits_for_the_gpu_is_not_captured(fakes, monkeypatch, caplog):
    monkeypatch.setattr(graphs, "_watched", lambda function, inputs, device: (function(*inputs), "loss.py, line 3,"))
    captured = Captured(lambda x: x + 1, CPU)
    with caplog.at_level(logging.WARNING):
        outputs = [captured(torch.tensor([float(n), 0.0])) for n in range(WARM_UP + 2)]
    assert [output[0].item() for output in outputs] == [n + 1.0 for n in range(WARM_UP + 2)]
    assert caplog.messages == ["training without CUDA graphs: loss.py, line 3, makes the host wait for the GPU"]
    assert not fakes


def test_a_capture_that_fails_is_one_line_and_no_step_is_lost(fakes, monkeypatch, caplog):
    def fail(function, places):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with advice")

    monkeypatch.setattr(graphs, "_capture", fail)
    monkeypatch.setattr(Captured, "_check_that_draws_work", lambda self: None)
    captured = Captured(lambda x: x + 1, CPU)
    with caplog.at_level(logging.WARNING):
        outputs = [captured(torch.tensor([float(n), 0.0])) for n in range(WARM_UP + 3)]
    assert [output[0].item() for output in outputs] == [n + 1.0 for n in range(WARM_UP + 3)]
    assert caplog.messages == [
        "training without CUDA graphs: CUDA error: operation not permitted when stream is capturing"
    ]


def test_a_generator_that_did_not_survive_ends_the_run_in_words(fakes, monkeypatch):
    def fail(function, places):
        raise RuntimeError("no graph")

    def broken(*arguments, **options):
        raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

    monkeypatch.setattr(graphs, "_capture", fail)
    captured = Captured(lambda x: x + 1, CPU)
    for _ in range(WARM_UP):
        captured(torch.zeros(2))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "rand", broken)
    with pytest.raises(CannotGoOn, match=r"\(no graph\).*--resume with compile=false goes on"):
        captured(torch.zeros(2))


class TestWhatCompileMeans:
    @pytest.mark.parametrize(
        ("settings", "device", "expected"),
        [
            ({}, GPU, True),
            ({}, CPU, False),
            ({"compile": False}, GPU, False),
            ({"compile": True}, GPU, False),
            ({"compile": "reduce-overhead"}, GPU, False),
        ],
    )
    def test_where_steps_are_captured(self, settings, device, expected, caplog):
        with caplog.at_level(logging.WARNING):
            assert steps_on_device(Recipe(**settings), device) is expected
        assert not caplog.messages

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"devices": 2}, "gradients of several devices are put together by the host"),
            ({"precision": "16-mixed"}, "precision 16-mixed decides on the host whether a step counts"),
        ],
    )
    def test_why_not(self, settings, reason, caplog):
        with caplog.at_level(logging.WARNING):
            assert not steps_on_device(Recipe(**settings), GPU)
        (line,) = caplog.messages
        assert reason in line
        # On a CPU there is nothing to be missed.
        caplog.clear()
        assert not steps_on_device(Recipe(**settings), CPU)
        assert not caplog.messages

    def test_torch_compile_is_for_those_who_ask(self):
        assert compile_mode(Recipe()) is None
        assert compile_mode(Recipe(compile=True)) == "default"


def test_compiled_code_goes_where_it_is_told(tmp_path, monkeypatch):
    import os

    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_compiled_code(tmp_path)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == "mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
