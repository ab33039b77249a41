"""The report's section on training: a narrow KANet learns handwritten digits, here and now."""

from __future__ import annotations

import csv
import importlib.util
import sys
import tempfile
from pathlib import Path

from kronattn.report.section import Content, Drawing, Highlight, Settings

__all__ = ["build"]


def build(settings: Settings) -> Content:
    """Train after ``recipes/digits.yaml`` and examine the result; for a single epoch where it must be quick."""
    missing = [name for name in ("lightning", "torchmetrics", "sklearn") if importlib.util.find_spec(name) is None]
    if missing:
        return Content(f"Not trained here: {', '.join(missing)} missing, pip install 'kronattn[train]'.")
    from kronattn.tasks import find_task
    from kronattn.training.evaluation import evaluate
    from kronattn.training.figures import draw_confusion, draw_curves
    from kronattn.training.recipe import load_recipe
    from kronattn.training.run import train

    accelerator = "gpu" if settings.device.type == "cuda" else "cpu"
    recipe = load_recipe("digits", [f"accelerator={accelerator}", *(["epochs=1"] if settings.quick else [])])
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "digits"
        show = not settings.quick and sys.stderr.isatty()
        result = train(recipe, folder=run, progress="bar" if show else None, track=settings.track)
        found = evaluate(run / "weights.safetensors", None, accelerator=accelerator).figures
        with (run / "history.csv").open() as file:
            rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    introduction = (
        f"A narrow {recipe.model.name} ({result['parameters']:,} parameters) learns scikit-learn's handwritten digits "
        f"from 1,437 images of 8 × 8 pixels and is examined on 360 that it has not seen: {100 * found['top1']:.1f}% "
        f"right after {recipe.epochs} epochs. The recipe is recipes/digits.yaml."
    )
    curves = Drawing(
        draw_curves(rows),
        "How it learned. The moving average of the weights is what is validated; it lags behind at first.",
        "Three line charts against the epoch: loss, accuracy and learning rate",
    )
    confusion = Drawing(
        draw_confusion(found["confusion"], [entry["name"] for entry in found["classes"]]),
        "What it takes each held-out digit for.",
        "A ten by ten confusion matrix, nearly all on its diagonal",
        narrow=True,
    )
    highlight = Highlight(f"{100 * found['top1']:.1f}%", "of held-out digits named right")
    return Content(introduction, [find_task(recipe.task).scores_table(found)], [curves, confusion], [highlight])
