"""Candidates in a process each: where all of them have to compile, and where two source trees are compared.

They prepare several at a time; then they take turns, one at a time, in rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kronattn.measure.compare import Comparison, Row, Way, median_rows
from kronattn.measure.environment import describe_environment
from kronattn.measure.timing import quartiles

__all__ = ["OLD", "Job", "compare_in_processes", "source_tree"]

# What a candidate of an earlier source tree is called, after its name.
OLD = " (old)"
_WORKER = Path(__file__).with_name("worker.py")
# Seconds between turns: long enough for threads that spin while they wait (OpenMP's, onnxruntime's) to go to sleep.
_PAUSE = 0.01


@dataclass(frozen=True)
class Job:
    """A candidate: a function in a file that makes its call, the function's arguments, and the tree to measure."""

    file: Path
    function: str
    arguments: Mapping[str, Any]
    tree: Path | None = None


def source_tree(path: str | Path) -> Path:
    """The folder to put on PYTHONPATH for a checkout, or for a folder that holds the package.

    Example:
        >>> source_tree("no/such/folder")
        Traceback (most recent call last):
        ...
        ValueError: no/such/folder holds no kronattn: give a checkout, such as `git worktree add PATH COMMIT` makes
    """
    for folder in (Path(path) / "src", Path(path)):
        if (folder / "kronattn" / "__init__.py").is_file():
            return folder.resolve()
    raise ValueError(f"{path} holds no kronattn: give a checkout, such as `git worktree add PATH COMMIT` makes")


def compare_in_processes(
    kind: str,
    candidates: Sequence[str],
    ways: Sequence[Way],
    job: Callable[[str, Way], Job],
    *,
    base: str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    packages: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    memory: bool = True,
    rounds: int = 7,
    seconds: float = 0.2,
    at_once: int = 4,
    repeats: int = 1,
    track: Callable[[Sequence[int]], Iterable[int]] = iter,
    keep: Callable[[Comparison], None] = lambda found: None,
) -> Comparison:
    """Measure candidates against each other as :func:`kronattn.measure.compare` does, in a process each.

    Args:
        kind, candidates, ways, base, device, dtype, packages, settings, track, keep: as there.
        job: gives what a candidate's process is to do.
        memory: whether to measure that too.
        rounds: in each of which every candidate has a turn.
        seconds: of one turn.
        at_once: how many may compile and run their first calls at a time.
        repeats: measure everything so often, in new processes: rows hold medians, and each run's time is a round. What
            the CPU bounds differs more from process to process than from round to round.
    """
    found = Comparison(
        kind=kind,
        base=base,
        settings={"dtype": str(dtype).removeprefix("torch."), "rounds": rounds, "repeats": repeats, **(settings or {})},
        environment=describe_environment(device, dtype, packages),
        command=" ".join(["kronattn", *sys.argv[1:]]),
    )

    def measured(ats: Iterable[int]) -> Generator[list[Row], None, None]:
        with ExitStack() as stack:
            workers = [
                {name: stack.enter_context(_Worker(job(name, way), way, str(device))) for name in candidates}
                for way in ways
            ]
            _prepare([worker for group in workers for worker in group.values()], at_once)
            for at in ats:
                turns = list(workers[at].values())
                for _ in range(rounds):
                    for worker in turns:
                        worker.take_turn(seconds)
                    turns.reverse()  # nobody always follows the same one
                yield [worker.row(name, memory) for name, worker in workers[at].items()]

    runs: list[list[Row]] = []
    for run in range(repeats):
        runs.append([])
        # A progress bar is for the first run: how long another takes is known by then.
        with closing(measured(track(range(len(ways))) if run == 0 else range(len(ways)))) as groups:
            for rows in groups:
                runs[-1] += rows
                keep(replace(found, rows=median_rows(runs), unfinished=True))
    found.rows = median_rows(runs)
    return found


def _prepare(workers: Sequence[_Worker], at_once: int) -> None:
    waiting = list(workers)
    asked = [waiting.pop(0) for _ in range(min(at_once, len(waiting)))]
    for worker in asked:
        worker.ask("prepare")
    while asked:
        asked.pop(0).answer()
        if waiting:
            asked.append(waiting.pop(0))
            asked[-1].ask("prepare")


class _Worker:
    """A process and what it said. One that has failed is asked nothing more."""

    def __init__(self, job: Job, way: Way, device: str) -> None:
        self.way, self.failed = way, ""
        self.times: list[float] = []
        self.cpu_times: list[float] = []
        told = {"file": str(job.file), "function": job.function, "arguments": dict(job.arguments)}
        environment = dict(os.environ)
        if job.tree is not None:
            environment["PYTHONPATH"] = str(job.tree)
        self._process = subprocess.Popen(
            [sys.executable, str(_WORKER), json.dumps({**told, "how": way.how, "device": device})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, question: Any) -> None:
        if self.failed:
            return
        assert self._process.stdin is not None
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
        except OSError:
            self.failed = "its process has ended"

    def answer(self) -> Any:
        if self.failed:
            return None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found = json.loads(line) if line else {"failed": "its process has ended"}
        if isinstance(found, dict):
            self.failed = found["failed"]
            return None
        return found

    def take_turn(self, seconds: float) -> None:
        time.sleep(_PAUSE)
        self.ask(seconds)
        taken = self.answer()
        if taken is not None:
            self.times.append(1e3 * taken[0])
            self.cpu_times.append(1e3 * taken[1])

    def row(self, name: str, memory: bool) -> Row:
        if memory:
            self.ask("memory")
        used = self.answer() if memory else None
        row = Row(name, dict(self.way.case), self.way.work, self.way.how)
        if self.failed:
            return replace(row, failed=self.failed)
        lower, median, upper = quartiles(self.times)
        return replace(
            row,
            time_ms=median,
            quartiles_ms=(lower, upper),
            rounds_ms=self.times,
            cpu_ms=quartiles(self.cpu_times)[1],
            cpu_rounds_ms=self.cpu_times,
            memory_bytes=used,
        )
