"""Doing a study: many runs at once on one device, each as soon as what it waits for is known."""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition
from typing import Any

import torch

from kronattn.models.files import build_model
from kronattn.study.plan import CannotChoose, Run, choose_rate, fingerprint, plan_runs
from kronattn.study.records import Records
from kronattn.study.settings import Study
from kronattn.study.stages import FINAL, SWEEP
from kronattn.training.comparison import check_data
from kronattn.training.folder import read_result
from kronattn.training.mps import sharing_gpu
from kronattn.training.recipe import Recipe
from kronattn.training.workers import serve

__all__ = ["Progress", "StudyQueue", "run_study"]

DECODED = ".decoded"
# Of the last runs of a layer: the first ones of a process also tune and compile.
_RECENT = 10


@dataclass(frozen=True)
class Ready:
    """A run with its recipe, as the processes take it."""

    run: Run
    recipe: Recipe
    folder: Path
    started: float = field(compare=False, default=0.0)

    @property
    def options(self) -> dict[str, Any]:
        return self.run.options


@dataclass(frozen=True)
class Progress:
    """What is told after each run."""

    run: Run
    record: dict[str, Any]
    done: int
    total: int


class StudyQueue:
    """The runs that are still to be done. One that counts is given out once those that choose for it are done.

    Args:
        runs: in the order of their worth.
        records: what is known, and where what becomes of the runs goes.
        deadline: a time (of ``time.monotonic``) that runs should end before: one that would not, going by others of its
            layer, is not begun.
        settled: called with each run that is not trained, and whether its record is new: nothing could be chosen for
            it, or its sweep was done again and chose as before.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        records: Records,
        data: Path,
        folder: Path,
        *,
        deadline: float | None = None,
        settled: Callable[[Run, bool], None] = lambda run, new: None,
    ) -> None:
        self.records, self.data, self.folder, self.deadline = records, data, folder, deadline
        self._settled = settled
        self._changed = Condition()
        self._pending = list(runs)
        self._running: list[Run] = []
        self._seconds: dict[tuple[str, str], deque[float]] = {}

    def take(self, known: set[str]) -> Ready | None:
        with self._changed:
            while self._pending:
                ready = [run for run in self._pending if self._is_ready(run)]
                if ready:
                    if (one := self._give(ready, known)) is not None:
                        return one
                    continue
                self._changed.wait()
            return None

    def _give(self, ready: Sequence[Run], known: set[str]) -> Ready | None:
        """One of the first ones, of a network that the process knows if there is any; none where time runs out, or
        where nothing can be chosen for the first, which then failed."""
        first = ready[0]
        alike = [run for run in ready if (run.part, run.stage, run.seed) == (first.part, first.stage, first.seed)]
        chosen = next((run for run in alike if _label(run) in known), first)
        if self.deadline is not None and time.monotonic() + self._expected(chosen) > self.deadline:
            self._pending = [run for run in self._pending if _label(run) != _label(chosen)]
            self._changed.notify_all()
            return None
        self._pending.remove(chosen)
        try:
            rate = chosen.rate if chosen.stage == SWEEP else choose_rate(chosen, self.records.sweep(chosen))
        except CannotChoose as error:
            recipe = chosen.recipe(self.data, None)
            self.records.add(chosen, fingerprint(recipe), recipe.optimiser.lr, None, failure=str(error))
            self._settled(chosen, True)
            return None
        record = self.records.get(chosen)
        if record is not None and record["failure"] is None and record["lr"] == rate:
            self._settled(chosen, False)
            return None
        self._running.append(chosen)
        known.add(_label(chosen))
        folder = self.folder / chosen.key.replace("/", "-")
        # Of an attempt that failed, or that was stopped.
        shutil.rmtree(folder, ignore_errors=True)
        return Ready(chosen, chosen.recipe(self.data, rate), folder, time.monotonic())

    def _is_ready(self, run: Run) -> bool:
        if run.stage == SWEEP:
            return True
        return not any(other.stage == SWEEP and other.place == run.place for other in (*self._pending, *self._running))

    def _expected(self, run: Run) -> float:
        """How long a run may take: the longest of the last few of its layer; of its data set, or of any, where it has
        none yet.

        Attention may take twice the time of others, which need not stop where nothing of it fits in any more.
        """
        layer = self._seconds.get((run.part.name, run.layer.name), ())
        data = [x for (name, _), recent in self._seconds.items() if name == run.part.name for x in recent]
        every = [x for recent in self._seconds.values() for x in recent]
        return max(layer or data or every, default=0.0)

    def finish(self, one: Ready) -> None:
        """A run ended, well or not: others may have waited for it."""
        with self._changed:
            self._running.remove(one.run)
            seconds = time.monotonic() - one.started
            self._seconds.setdefault((one.run.part.name, one.run.layer.name), deque(maxlen=_RECENT)).append(seconds)
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._pending.clear()
            self._changed.notify_all()


def _label(run: Run) -> str:
    return f"{run.part.name}, {run.layer.name}"


def run_study(
    study: Study,
    data: Path,
    records: Records,
    folder: Path,
    *,
    jobs: int = 1,
    take_turns: bool = False,
    minutes: float | None = None,
    retry: bool = False,
    on_run: Callable[[Progress], None] = lambda progress: None,
) -> int:
    """Do all runs that the records do not have; how many are still missing afterwards.

    Args:
        data: the folder with all data.
        folder: for the runs' logs and histories.
        jobs: processes that train side by side.
        take_turns: have them take turns on a GPU, without NVIDIA's multi-process service.
        minutes: after which no run should be under way.
        retry: do those again that failed, and those that count for which a sweep then chooses otherwise.
    """
    runs = plan_runs(study)
    missing = [run for run in runs if not _is_done(run, records, data, retry)]
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    done = len(runs) - len(missing)

    def settled(run: Run, new: bool = True) -> None:
        nonlocal done
        done += 1
        if new:
            on_run(Progress(run, records.runs[run.key], done, len(runs)))

    def ended(one: Ready, failure: str) -> None:
        result = read_result(one.folder)
        seconds = time.monotonic() - one.started
        if not failure and result is None:
            failure = "no result"
        failure = failure or _without_score(one.run, result)
        kept = None if failure or result is None else {**result, "jobs": jobs}
        records.add(
            one.run, fingerprint(one.recipe), one.recipe.optimiser.lr, kept, failure=failure or None, seconds=seconds
        )
        settled(one.run)
        queue.finish(one)

    if minutes != 0:
        # Else each run would fail by itself, and be in the tables.
        _check_data(missing, data)
        _check_networks(missing, data)
    if missing:
        queue = StudyQueue(missing, records, data, folder, deadline=deadline, settled=settled)
        folder.mkdir(parents=True, exist_ok=True)
        processes = min(jobs, len(missing))
        try:
            with sharing_gpu([run.part.base for run in missing], 1 if take_turns else processes):
                serve(queue, processes, ended, folder / DECODED)
        finally:
            shutil.rmtree(folder / DECODED, ignore_errors=True)
    return sum(records.get(run) is None for run in runs)


def _check_data(runs: Sequence[Run], data: Path) -> None:
    """Find every list of samples that the runs need."""
    for part in {run.part.name: run.part for run in runs}.values():
        part.sources(data)
        for fold in {run.fold: None for run in runs if run.part.name == part.name}:
            alike = [run for run in runs if (run.part.name, run.fold) == (part.name, fold)]
            tests = ["test"] if any(run.stage == FINAL for run in alike) else []
            try:
                check_data(alike[0].recipe(data, None), ["train", "val", *tests])
            except (ValueError, OSError) as error:
                raise ValueError(f"data.{part.name}: {error}") from None


def _check_networks(runs: Sequence[Run], data: Path) -> None:
    """Build every network once, without memory for its weights."""
    for (part, layer), run in {(run.part.name, run.layer.name): run for run in runs}.items():
        model = run.recipe(data, None).model
        try:
            with torch.device("meta"):
                build_model(model.name, model.all_options)
        except (ValueError, TypeError) as error:
            raise ValueError(f"data.{part} with layers.{layer}: {error}") from None


def _is_done(run: Run, records: Records, data: Path, retry: bool) -> bool:
    record = records.get(run)
    if record is None or (retry and record["failure"] is not None):
        return False
    if run.stage == SWEEP or record["failure"] is None:
        rate = run.rate if run.stage == SWEEP else record["lr"]
        records.get(run, fingerprint(run.recipe(data, rate)))
    if run.stage == FINAL and record["failure"] is None:
        if retry and records.has_failed_sweep(run):
            # Whether it counts is known once that is done again.
            return False
        rate = choose_rate(run, records.sweep(run))
        if rate is not None and rate != record["lr"]:
            if retry:
                return False
            raise ValueError(
                f"{records.path}: {run.key} has the learning rate {record['lr']:g}, but its sweep chooses {rate:g}: "
                "--retry does it again"
            )
    return True


def _without_score(run: Run, result: Mapping[str, Any] | None) -> str:
    """A failure in words where a score is no number: of a part in which no class is, for instance."""
    found = result or {}
    scores = {"validation": found.get(run.part.score)}
    if run.stage == FINAL:
        scores["test"] = found.get("test", {}).get(run.part.score)
    bad = [name for name, score in scores.items() if score is None or not math.isfinite(score)]
    return f"its {' and '.join(bad)} {run.part.score} is no number" if bad else ""
