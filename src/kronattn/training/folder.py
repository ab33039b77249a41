"""A run's folder: what its files are called, and what is read from them.

Lightning is not imported here: a process that has others train knows these names as soon as it starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kronattn.training.recipe import Recipe

__all__ = ["read_result", "run_folder"]

PLANNED, LOG = "planned.yaml", "log.txt"
CONFIG, HISTORY, RESULT, CURVES = "config.yaml", "history.csv", "result.json", "curves.png"
WEIGHTS, LAST_WEIGHTS, CARD = "weights.safetensors", "weights-last.safetensors", "README.md"
LAST, BEST = "last.ckpt", "best.ckpt"
WRITTEN = (CONFIG, HISTORY, RESULT, CURVES, WEIGHTS, LAST_WEIGHTS, CARD, LAST, BEST)


def run_folder(recipe: Recipe, name: str = "run") -> Path:
    """Where a run's files go: what the recipe says, or a name made of recipe, network and seed."""
    model = recipe.model.label.replace("/", "-")
    return Path(recipe.output or f"runs/{name}-{model}-seed{recipe.seed}")


def read_result(folder: Path) -> dict[str, Any] | None:
    """The figures of a finished run; ``None`` where there is none."""
    path = folder / RESULT
    return json.loads(path.read_text()) if path.exists() else None
