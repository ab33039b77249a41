"""A model card: what a file of weights is, how it came about, and how good it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kronattn.models.files import Description
from kronattn.training.recipe import Recipe, recipe_yaml, without_places

__all__ = ["model_card"]


def model_card(description: Description, recipe: Recipe, result: Mapping[str, Any], *, with_last: bool = True) -> str:
    """Markdown for the README beside a file of weights; ``with_last`` if those of the last epoch lie beside it too."""
    figures = [
        ("validation top-1", _percent(result.get("top1"))),
        ("validation top-5", _percent(result.get("top5"))),
        ("validation mean IoU", _percent(result.get("mean_iou"))),
        ("validation pixel accuracy", _percent(result.get("pixel_accuracy"))),
        ("parameters", f"{result['parameters']:,}"),
        (f"multiply-adds at {result['size']}²", f"{result['madd']:,}"),
        ("epochs", str(result["epochs"])),
        ("seed", str(result["seed"])),
    ]
    table = "\n".join(f"| {name} | {value} |" for name, value in figures if value)
    versions = ", ".join(f"{name} {value}" for name, value in result["environment"].items())
    averaged = f" These are the moving average of the weights (decay {recipe.ema})." if recipe.ema else ""
    return f"""# {description.model} on {description.data}

{len(description.classes)} classes: {description.some_classes()}.

{_prepared(description)}, and normalised with mean {_listed(description.mean)} and standard deviation \
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
    """Which epoch's weights these are; runs of earlier versions kept the last alone."""
    best = result.get("best_epoch", result["epochs"])
    if best == result["epochs"]:
        return "The weights and the figures are those after the last epoch."
    chosen = f"The weights and the figures are those after epoch {best} of {result['epochs']}, which validated best"
    return chosen + ("; those after the last epoch are in weights-last.safetensors." if with_last else ".")


def _prepared(description: Description) -> str:
    if description.task == "segmentation":
        return "An image of any size is taken as it is"
    size, resize = description.size, description.resize
    square = "The square in the middle of an image" if description.keep_aspect else "An image"
    return f"{square} is scaled to {resize} × {resize}, its centre of {size} × {size} taken"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}%"


def _listed(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:g}" for value in values) + ")"
