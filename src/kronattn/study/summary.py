"""From a study's runs to what they say: each layer's test score, and its difference to the references."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kronattn.study.stages import FINAL, SWEEP
from kronattn.study.statistics import SIGNIFICANT, Difference, holm, paired_difference

__all__ = ["summarise_study", "verdict"]


def summarise_study(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each data set: its layers, each with scores and differences, the number of comparisons, and what failed.

    Differences are of test scores, paired by seed; where the data has folds, by fold, each the mean over its seeds:
    runs that share their test are no independent pairs. Holm's correction is over all comparisons of a data set.

    Args:
        found: what :class:`kronattn.study.records.Records` writes.
    """
    return [_summarise_part(part, found) for part in found["study"]["data"]]


def _summarise_part(part: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    runs = [run for run in found["runs"] if run["data"] == part["name"] and run["layer"] in part["layers"]]
    finals = [run for run in runs if run["stage"] == FINAL]
    references = [name for name in found["study"]["references"] if name in part["layers"]]
    scores = {name: _scores(name, finals) for name in part["layers"]}
    differences: dict[tuple[str, str], Difference] = {}
    for name in part["layers"]:
        for reference in references:
            shared = sorted(set(scores[name]) & set(scores[reference]), key=str)
            if name != reference and shared:
                pair = ([scores[which][unit] for unit in shared] for which in (name, reference))
                differences[name, reference] = paired_difference(*pair)
    # Two references are compared with each other in both directions: that is one comparison.
    p_values = {frozenset(pair): one.p for pair, one in differences.items()}
    adjusted = dict(zip(p_values, holm(list(p_values.values())), strict=True))
    return {
        "name": part["name"],
        "title": part["title"],
        "caveat": part["caveat"],
        "score": part["score"],
        "score_label": part["score_label"],
        "paired_by": "fold" if part["folds"] else "seed",
        "references": references,
        "comparisons": len(p_values),
        "runs": len(finals),
        "planned": part["planned"],
        "seconds": sum(run["seconds"] for run in runs),
        "layers": [
            {
                "layer": name,
                "runs": sum(run["layer"] == name and run["failure"] is None for run in finals),
                "mean": statistics.fmean(scores[name].values()) if scores[name] else None,
                "std": statistics.stdev(scores[name].values()) if len(scores[name]) > 1 else None,
                "validation": _mean(run["validation"] for run in finals if run["layer"] == name),
                "learning_rates": _rates(name, finals),
                "failures": [f"{run['key']}: {run['failure']}" for run in runs if _has(run, name, "failure")],
                "parameters": next((run["parameters"] for run in finals if _has(run, name, "parameters")), None),
                "madd": next((run["madd"] for run in finals if _has(run, name, "madd")), None),
                "peak_bytes": max((run["peak_bytes"] for run in finals if _has(run, name, "peak_bytes")), default=None),
                "differences": {
                    reference: {
                        "mean": one.mean,
                        "low": one.low,
                        "high": one.high,
                        "p": one.p,
                        "p_holm": adjusted[frozenset((name, reference))],
                        "pairs": one.pairs,
                        "verdict": verdict(one, adjusted[frozenset((name, reference))]),
                    }
                    for reference in references
                    if (one := differences.get((name, reference))) is not None
                },
            }
            for name in part["layers"]
        ],
        "sweep": [
            {name: run[name] for name in ("layer", "lr", "fold", "validation", "failure")}
            for run in runs
            if run["stage"] == SWEEP
        ],
    }


def verdict(difference: Difference, p_holm: float | None) -> str:
    """What a difference shows: "better" or "worse" after Holm's correction, "maybe better" or "maybe worse" where its
    own interval alone excludes zero, "no difference shown" otherwise."""
    if not difference.excludes_zero or p_holm is None:
        return "no difference shown"
    word = "better" if difference.mean > 0 else "worse"
    return word if p_holm < SIGNIFICANT else f"maybe {word}"


def _scores(layer: str, finals: Sequence[Mapping[str, Any]]) -> dict[Any, float]:
    """Test scores by what is paired: the seed, or the fold."""
    by_unit: dict[Any, list[float]] = {}
    for run in finals:
        if run["layer"] == layer and run["failure"] is None and run["test"] is not None:
            by_unit.setdefault(run["seed"] if run["fold"] is None else run["fold"], []).append(run["test"])
    return {unit: statistics.fmean(values) for unit, values in by_unit.items()}


def _rates(layer: str, finals: Sequence[Mapping[str, Any]]) -> list[float]:
    return sorted({run["lr"] for run in finals if run["layer"] == layer and run["failure"] is None})


def _has(run: Mapping[str, Any], layer: str, name: str) -> bool:
    return run["layer"] == layer and run.get(name) is not None


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
