"""One candidate in a process of its own: ``python worker.py JSON``, with the source tree to measure on PYTHONPATH.

Of kronattn it imports files beside it alone, so that it can measure an earlier tree, whose modules are others: the file
that makes the call is named in the JSON, with what it is to be given. Then a line of JSON is an answer to each line on
standard input: "prepare", a number of seconds to spend on timing, or "memory".
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import sys
import time
from typing import Any

import torch


def main() -> None:
    """Answer until nobody asks."""
    # A script finds the files beside it by their own names.
    from memory import peak_memory  # type: ignore[import-not-found]

    # Libraries print; answers have a way of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    call: Any = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question == "prepare":
                call = _prepare(job)
                answer: Any = "ready"
            elif question == "memory":
                answer = peak_memory(call, device=job["device"])
            else:
                answer = _time(call, question, job)
            _finish(job)
        except Exception as error:  # whatever it is, the others are to be measured
            answer = {"failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(answer), file=answers, flush=True)


def _prepare(job: dict[str, Any]) -> Any:
    call = runpy.run_path(job["file"])[job["function"]](**job["arguments"])
    if job["how"] == "graphs":
        from timing import replayed  # type: ignore[import-not-found]

        with torch.no_grad():
            run = replayed(lambda _: call(), [None])
    else:
        # Weights were made outside of inference mode, which training has to leave; calls run inside of it.
        run = torch.inference_mode()(call)
    for _ in range(3):
        run()
    return run


def _time(call: Any, seconds: float, job: dict[str, Any]) -> list[float]:
    """What a call takes of the clock and of the processor, in seconds."""
    for _ in range(3):
        call()  # the memory was given back, and caches hold another candidate's data
    once, _ = _seconds(call, 1, job)
    repeats = max(3, round(seconds / once))
    if job["device"].startswith("cuda"):
        return _seconds(call, repeats, job)
    # The median and not the mean: a thread that has to wait for its core makes one call a hundred times longer.
    clocks = zip(*(_seconds(call, 1, job) for _ in range(repeats)), strict=True)
    return [statistics.median(clock) for clock in clocks]


def _seconds(call: Any, repeats: int, job: dict[str, Any]) -> list[float]:
    _synchronise(job)
    begun = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    _synchronise(job)
    ended = time.perf_counter(), time.process_time()
    return [(end - start) / repeats for start, end in zip(begun, ended, strict=True)]


def _finish(job: dict[str, Any]) -> None:
    """Leave the memory to the others."""
    _synchronise(job)
    if job["device"].startswith("cuda"):
        torch.cuda.empty_cache()


def _synchronise(job: dict[str, Any]) -> None:
    if job["device"].startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
