"""A run's folder: what its files are called, and what is read from them.

Lightning is not imported here: a process that has others train knows these names as soon as it starts.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from kronattn.training.recipe import Recipe, load_recipe, recipe_yaml, without_places

__all__ = ["check_same_settings", "read_result", "refuse_foreign_files", "run_folder"]

PLANNED, LOG = "planned.yaml", "log.txt"
CONFIG, HISTORY, RESULT, CURVES = "config.yaml", "history.csv", "result.json", "curves.png"
WEIGHTS, LAST_WEIGHTS, CARD = "weights.safetensors", "weights-last.safetensors", "README.md"
LAST, BEST = "last.ckpt", "best.ckpt"
WRITTEN = (CONFIG, HISTORY, RESULT, CURVES, WEIGHTS, LAST_WEIGHTS, CARD, LAST, BEST)
# What a run may have left that broke off before its first checkpoint was whole; the best is written before the last.
_LEFT_EARLY = (CONFIG, HISTORY, RESULT, BEST)


def run_folder(recipe: Recipe, name: str = "run") -> Path:
    """Where a run's files go: what the recipe says, or a name made of recipe, network and seed."""
    model = recipe.model.label.replace("/", "-")
    return Path(recipe.output or f"runs/{name}-{model}-seed{recipe.seed}")


def read_result(folder: Path) -> dict[str, Any] | None:
    """The figures of a finished run; ``None`` where there is none."""
    path = folder / RESULT
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError:
        raise ValueError(f"{path} is no JSON, or cut short: remove it, and the run writes it anew") from None


def check_same_settings(folder: Path, recipe: Recipe, option: str = "--output") -> None:
    """Refuse to take a run's results for those of other settings; where its data lies may have changed.

    Args:
        option: the command's, for another folder.
    """
    used = folder / CONFIG
    if used.exists() and _what_counts(load_recipe(used)) != _what_counts(recipe):
        raise ValueError(f"{folder} holds a run with other settings, those of {used}: {option} takes another folder")


def _what_counts(recipe: Recipe) -> Any:
    """A recipe's settings as a file has them, without those of the machine alone."""
    general = without_places(recipe)
    model = replace(general.model, context=None, options=general.model.all_options)
    data = replace(general.data, workers=0, in_memory="auto")
    return yaml.safe_load(recipe_yaml(replace(general, model=model, data=data, accelerator="auto", threads=None)))


def refuse_foreign_files(folder: Path) -> None:
    """Refuse a folder with files that a run would write over, unless they are of a run that broke off early."""
    own = _LEFT_EARLY if (folder / PLANNED).exists() or _holds_own_recipe(folder) else ()
    foreign = [name for name in WRITTEN if name not in own and (folder / name).exists()]
    if foreign:
        raise FileExistsError(
            f"{folder} holds {', '.join(foreign)}, which a run would write over: --output takes another folder"
        )


def _holds_own_recipe(folder: Path) -> bool:
    """Whether the recipe there is one that a run wrote: with every setting, as runs write them."""
    try:
        return (folder / CONFIG).read_text() == recipe_yaml(load_recipe(folder / CONFIG))
    except (ValueError, TypeError, OSError):
        return False
