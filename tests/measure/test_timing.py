"""How calls are timed; no test depends on how long anything takes."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch

from kronattn.measure import replayed, time_calls, timing


@pytest.fixture
def clock(monkeypatch):
    """A clock that only calls move, so that times are exact."""

    class Clock:
        now = 0.0

        def takes(self, seconds, log=None, name=""):
            def call():
                self.now += seconds
                if log is not None:
                    log.append(name)

            return call

    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def test_reports_the_seconds_of_one_call(clock):
    timings = time_calls({"short": clock.takes(1e-4), "long": clock.takes(0.1)}, seconds=1)
    assert timings["short"].median == pytest.approx(1e-4)
    assert timings["long"].median == pytest.approx(0.1)
    assert timings["long"].lower <= timings["long"].median <= timings["long"].upper


def test_short_calls_are_repeated_within_a_turn(clock):
    log = []
    timings = time_calls({"short": clock.takes(2**-10, log, "short")}, seconds=1, most=5, sample_seconds=2**-5)
    # A first call and three more to warm up, and in each turn one to warm up and 32 that are timed.
    assert timings["short"].turns == 5
    assert len(log) == 4 + 5 * (1 + 32)


def test_calls_take_turns(clock):
    log = []
    calls = {name: clock.takes(0.1, log, name) for name in "abc"}
    time_calls(calls, seconds=3, most=4)
    turns = log[-12:]
    assert turns == ["a", "b", "c"] * 4


def test_short_calls_have_more_turns_than_long_ones(clock):
    # Powers of two, which the clock adds up without rounding.
    calls = {"short": clock.takes(1 / 64), "long": clock.takes(1 / 4)}
    timings = time_calls(calls, seconds=2, least=3, most=16, sample_seconds=1 / 32)
    assert timings["short"].turns == 16
    assert timings["long"].turns == (2 - 16 / 32) / (1 / 4)


def test_fewest_turns_are_run_however_long_they_take(clock):
    log = []
    timings = time_calls({"endless": clock.takes(100.0, log)}, seconds=1, least=3)
    assert timings["endless"].turns == 3
    assert len(log) == 3  # the warm-up was one of them


def test_median_and_quartiles(monkeypatch, clock):
    durations = iter([1.0, 9.0, 2.0, 3.0, 4.0])

    def call():
        clock.now += next(durations)

    timed = time_calls({"noisy": call}, seconds=5, least=5, most=5)["noisy"]
    assert (timed.lower, timed.median, timed.upper) == (2.0, 3.0, 4.0)


def test_runs_in_inference_mode():
    modes = set()
    time_calls({"call": lambda: modes.add(torch.is_inference_mode_enabled())}, seconds=1e-3, sample_seconds=1e-6)
    assert modes == {True}


def test_what_a_graph_reads_is_kept(monkeypatch):
    """The weights, which only the captured call knew: their memory would be given to others."""
    for name in ("Stream", "current_stream", "synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    network = torch.nn.Linear(2, 2)
    seen = weakref.ref(network)
    call = partial(network, torch.zeros(1, 2))
    replay = replayed(lambda _, call=call: call(), [None])
    del call
    del network
    gc.collect()
    assert seen() is not None
    del replay
    gc.collect()
    assert seen() is None
