"""What the files in results/ hold, for the tools that show it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kronattn.measure import Comparison, Row, Way, read_comparison
from kronattn.study.summary import summarise_study

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"

# Where two of them ask the same of the same network, the first is the one to go by.
STUDIES = (
    "study",
    "study-segmentation-short",
    "study-short",
    "study-camvid-small",
    "study-controls-short",
    "study-imagenette-clipped",
    "study-imagenette-longer",
    "study-imagenette-short",
    "study-options-short",
    "study-gate-short",
    "study-sample-norm",
    "study-gate-mean",
)


def read(name: str) -> Any:
    """A file in results/ that is no comparison of speeds."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def compared(name: str) -> Comparison:
    """A file in results/ that is one."""
    return read_comparison(RESULTS / f"{name}.json")


def row_of(found: Comparison, candidate: str, way: Way) -> Row:
    """A row that has to be there."""
    row = found.find(candidate, way)
    if row is None:
        raise SystemExit(f"results/ have no {candidate} on {way}")
    return row


def decided() -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each data set and network by the first study that decides it, with that study's costs."""
    chosen: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for found in [read(name) for name in STUDIES if (RESULTS / f"{name}.json").exists()]:
        for part in summarise_study(found):
            if part["runs"] and (part["title"] not in chosen or chosen[part["title"]][0]["caveat"]):
                chosen[part["title"]] = part, found["costs"]
    # What is about the same data stands together.
    return [chosen[title] for title in sorted(chosen)]
