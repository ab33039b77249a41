"""What the files in results/ hold, for the tools that show it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kronattn.measure import Comparison, Row, Way, read_comparison

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"


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
