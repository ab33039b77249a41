"""Several networks, each with several seeds, under one recipe: what differs, and by how much more than seeds do."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kronattn.atomic import write_atomically
from kronattn.models.registry import task_of
from kronattn.tasks import find_task
from kronattn.training.errors import OneLineError
from kronattn.training.folder import RESULT, check_same_settings, read_result
from kronattn.training.intervals import confidence_interval
from kronattn.training.mps import sharing_gpu
from kronattn.training.precompile import precompiling
from kronattn.training.recipe import Recipe
from kronattn.training.workers import run_in_processes

__all__ = ["Plan", "check_data", "confidence_interval", "measure_alone", "parse_seeds", "plan", "run_all", "summarise"]


@dataclass(frozen=True)
class Plan:
    """One run of a comparison."""

    recipe: Recipe
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.recipe.model.label}, seed {self.recipe.seed}"


def parse_seeds(text: str) -> list[int]:
    """Seeds from a list with ranges.

    Example:
        >>> parse_seeds("0-2,7")
        [0, 1, 2, 7]
    """
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            found += range(int(first), int(last) + 1) if dash else [int(first)]
        except ValueError:
            raise ValueError(f"seeds are numbers and ranges such as 0-4 or 0,2,5, not {text!r}") from None
    if not found or len(set(found)) != len(found):
        raise ValueError(f"seeds must be different from each other, at least one: {text!r}")
    return found


def plan(
    recipe: Recipe, models: Sequence[str], seeds: Sequence[int], folder: Path, contexts: Sequence[str] = ()
) -> list[Plan]:
    """Every network with every seed; seeds outermost, so that a comparison that is stopped compares all networks.

    With ``contexts``, names of context layers, every network with each of them in the place of its attention.
    """
    networks = [
        replace(recipe.model, name=name, context=context)
        for name in models
        for context in contexts or (recipe.model.context,)
    ]
    plans = []
    for seed in seeds:
        for network in networks:
            place = folder / f"{re.sub('[/:]', '-', network.label)}-seed{seed}"
            single = replace(recipe, model=network, seed=seed, output=str(place))
            plans.append(Plan(single, place))
    return plans


def run_all(
    plans: Sequence[Plan],
    *,
    jobs: int = 1,
    take_turns: bool = False,
    on_result: Callable[[Plan, dict[str, Any]], None] = lambda plan, result: None,
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Run what has not run yet, ``jobs`` at a time, in as many processes.

    A process trains one run after another and keeps to its networks as far as it can: what was imported, compiled,
    tuned and decoded for one seed serves the next. Finished runs are taken as they are, interrupted ones resumed; a run
    that fails does not stop the others. On a GPU the processes run side by side (:mod:`kronattn.training.mps`) unless
    they are to ``take_turns``.

    Returns:
        The results, in the plans' order, and each failed run's error, one line, by the run's name.
    """
    for one in plans:
        if not one.recipe.model.name.startswith("timm/"):
            task_of(one.recipe.model.name)  # an unknown one is an error here, not after hours of training the others
        check_same_settings(one.folder, one.recipe, "--folder")
    failures: dict[str, str] = {}

    def done(one: Any, failure: str) -> None:
        result = read_result(one.folder)
        if failure or result is None:
            failures[one.name] = failure or "no result"
            return
        result["jobs"] = jobs
        write_atomically(one.folder / RESULT, json.dumps(result, indent=2) + "\n")
        on_result(one, result)

    missing = []
    for one in plans:
        result = read_result(one.folder)
        if result is None:
            missing.append(one)
        else:
            on_result(one, result)
    processes = 1 if take_turns else min(jobs, len(missing))
    networks = {one.recipe.model.label: one.recipe for one in missing}
    with (
        _decoded_together(missing, jobs) as decoded,
        precompiling(*networks.values(), jobs=min(jobs, len(missing))),
        sharing_gpu([one.recipe for one in missing], processes),
    ):
        run_in_processes(missing, jobs, done, decoded)
    found = [read_result(one.folder) for one in plans if one.name not in failures]
    return [result for result in found if result is not None], failures


@contextmanager
def _decoded_together(plans: Sequence[Plan], jobs: int) -> Iterator[Path | None]:
    """A folder for decoded images that the processes share, for as long as they run; a recipe's cache stays.

    Always the same, so that a comparison that is started again after it was killed finds it, and takes it away.
    """
    if jobs == 1 or not plans or plans[0].recipe.cache is not None:
        yield None
        return
    decoded = plans[0].folder.parent / ".decoded"
    try:
        yield decoded
    finally:
        shutil.rmtree(decoded, ignore_errors=True)


def check_data(recipe: Recipe, splits: Iterable[str] = ("train", "val")) -> None:
    """Read the lists of samples of a recipe's data: what is wrong with them is said before runs, not after each."""
    # Here: Lightning takes seconds to import.
    from kronattn.training.data import load_data_module

    module = load_data_module(find_task(recipe.task))(recipe.data, recipe.batch_size)
    for split in splits:
        module.split(split)


def measure_alone(plans: Sequence[Plan], epochs: int) -> dict[str, dict[str, Any]]:
    """Train each network once more for a few epochs, with the device to itself: images a second, and peak memory."""
    recipes = {one.recipe.model.label: one.recipe for one in reversed(plans)}
    found = {}

    def done(one: Any, failure: str) -> None:
        if failure:
            raise OneLineError(f"{one.recipe.model.label} alone: {failure}")
        result = read_result(one.folder)
        assert result is not None
        kept = ("images_per_second", "waiting_for_data", "peak_bytes")
        found[one.recipe.model.label] = {key: result[key] for key in kept}

    with tempfile.TemporaryDirectory() as folder:
        places = (Path(folder) / f"run{number}" for number in range(len(recipes)))
        short = [replace(recipe, epochs=epochs, validate_every=epochs) for recipe in recipes.values()]
        alone = [Plan(recipe, place) for recipe, place in zip(short, places, strict=True)]
        run_in_processes(alone, 1, done)
    return {one.recipe.model.label: found[one.recipe.model.label] for one in plans}


def summarise(
    results: Sequence[Mapping[str, Any]],
    baseline: str,
    score: str = "top1",
    speeds: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """For each network: mean and standard deviation of the score, and the paired difference to the baseline's.

    The difference is taken seed by seed; its confidence interval is Student's. Images a second, and the share of the
    time spent waiting for data, are those of ``speeds``, by network, as :func:`measure_alone` gives them; without, the
    medians of the runs that had the device to themselves.

    Example:
        >>> run = {"images_per_second": None, "parameters": 1, "madd": 1}
        >>> scores = {("a", 0): 0.8, ("a", 1): 0.9, ("b", 0): 0.85, ("b", 1): 0.95}
        >>> runs = [{"model": model, "seed": seed, "top1": value, **run} for (model, seed), value in scores.items()]
        >>> [round(row["difference"]["mean"], 3) for row in summarise(runs, "a") if row["difference"]]
        [0.05]
    """
    by_model: dict[str, dict[int, Mapping[str, Any]]] = {}
    for result in results:
        by_model.setdefault(result["model"], {})[result["seed"]] = result
    if baseline not in by_model:
        raise ValueError(f"the baseline {baseline!r} is not among the networks: {', '.join(by_model)}")
    summary = []
    for model, runs in by_model.items():
        scores = [run[score] for run in runs.values()]
        if speeds is None:
            timed = [run for run in runs.values() if run.get("jobs", 1) == 1]
        else:
            timed = [speeds[model]] if model in speeds else []
        peaks = [run["peak_bytes"] for run in runs.values() if run.get("peak_bytes")]
        row: dict[str, Any] = {
            "model": model,
            "runs": len(scores),
            "mean": statistics.mean(scores),
            "std": statistics.stdev(scores) if len(scores) > 1 else None,
            **{other: statistics.mean(run[other] for run in runs.values()) for other in _others(runs)},
            **{name: _median(run.get(name) for run in timed) for name in ("images_per_second", "waiting_for_data")},
            "peak_bytes": max(peaks) if peaks else None,
            "parameters": next(iter(runs.values()))["parameters"],
            "madd": next(iter(runs.values()))["madd"],
            "difference": None,
        }
        shared = sorted(set(runs) & set(by_model[baseline]))
        if model != baseline and shared:
            paired = [runs[seed][score] - by_model[baseline][seed][score] for seed in shared]
            low, high = confidence_interval(paired)
            row["difference"] = {"mean": statistics.mean(paired), "low": low, "high": high, "pairs": len(paired)}
        summary.append(row)
    return summary


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _others(runs: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """What is told beside the score, where every run has it."""
    return [name for name in ("top5", "pixel_accuracy") if all(name in run for run in runs.values())]
