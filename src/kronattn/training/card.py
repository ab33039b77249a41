"""A model card: what a file of weights is, how it came about, and how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kronattn.models.files import Description
from kronattn.tasks import find_task
from kronattn.training.recipe import Recipe, recipe_yaml, without_places

__all__ = ["model_card"]


def model_card(description: Description, recipe: Recipe, result: Mapping[str, Any], *, with_last: bool = True) -> str:
    """Markdown for the README beside a file of weights; ``with_last`` if those of the last epoch lie beside it too."""
    task = find_task(description.task)
    figures = [
        *((f"validation {name}", f"{result[key]:.2%}") for key, name in task.figures.items() if key in result),
        ("parameters", f"{result['parameters']:,}"),
        (f"multiply-adds at {result['size']}²", f"{result['madd']:,}"),
        ("epochs", str(result["epochs"])),
        ("seed", str(result["seed"])),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in figures)
    versions = ", ".join(f"{name} {value}" for name, value in result["environment"].items())
    averaged = f" These are the moving average of the weights (decay {recipe.ema})." if recipe.ema else ""
    return f"""# {description.model} on {description.data}

{len(description.classes)} classes: {description.some_classes()}.

{task.prepared(description)}, and normalised with mean {_listed(description.mean)} and standard deviation \
{_listed(description.std)}.

| | |
|---|---|
{table}

{_which(result, with_last)}{averaged}

## How it was trained

With these settings in config.yaml, this trains it again:

```
kronattn train --config config.yaml --data PATH
```

```yaml
{recipe_yaml(without_places(recipe))}```

It ran with {versions}.
"""


def _which(result: Mapping[str, Any], with_last: bool) -> str:
    """Which epoch's weights these are."""
    best = result["best_epoch"]
    if best == result["epochs"]:
        return "The weights and the figures are those after the last epoch."
    chosen = f"The weights and the figures are those after epoch {best} of {result['epochs']}, which validated best"
    return chosen + ("; those after the last epoch are in weights-last.safetensors." if with_last else ".")


def _listed(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:g}" for value in values) + ")"
