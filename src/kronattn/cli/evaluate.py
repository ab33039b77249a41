"""``kronattn evaluate``: how good a trained network is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kronattn.cli.options import (
    WEIGHTS_HELP,
    Data,
    Json,
    Quiet,
    SkipBadImages,
    accelerator_of,
    figure_file,
    given_network,
    show_tables,
)
from kronattn.cli.output import console, progress, write_figure

__all__ = ["evaluate"]

PICTURES = 6
# With others the weights, but not the images, are of another type.
_PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


def evaluate(
    checkpoint: str | None = typer.Argument(None, help="The same as --weights.", show_default=False),
    weights: str | None = typer.Option(None, "--weights", "-w", help=WEIGHTS_HELP),
    data: Data = None,
    dataset: str | None = typer.Option(None, help="Its kind. Default: the one that the network was trained on."),
    split: str = typer.Option("val", help="Which part of it."),
    batch: int | None = typer.Option(None, min=1, help="Images in a batch. Default: by task and device."),
    device: str = typer.Option("auto", help="Where to run: auto, cpu, cuda, mps."),
    precision: str = typer.Option("32-true", help="32-true, bf16-mixed or 16-mixed."),
    workers: int = typer.Option(8, min=0, help="Processes that decode, where images are not kept in memory."),
    skip_bad_images: SkipBadImages = False,
    output: Annotated[
        Path | None, figure_file("--output", "-o", help="Draw the confusion matrix into this file, .png or .svg.")
    ] = None,
    pictures: Annotated[
        Path | None, figure_file("--pictures", help="Of a segmenter: draw predictions into this file, .png or .svg.")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Top-1, top-5, calibration and each class's accuracy; of a segmenter pixel accuracy and each class's IoU.

    Example: kronattn evaluate --weights kanet_kv --data imagenette-144-val.tar
    """
    from kronattn.tasks import find_task
    from kronattn.training.evaluation import evaluate as examine
    from kronattn.training.figures import draw_confusion, draw_pictures

    if precision not in _PRECISIONS:
        raise ValueError(f"--precision must be {', '.join(_PRECISIONS[:-1])} or {_PRECISIONS[-1]}, not {precision!r}")
    evaluated = examine(
        given_network(checkpoint, weights),
        data,
        data=dataset,
        split=split,
        batch_size=batch,
        accelerator=accelerator_of(device),
        precision=precision,
        workers=workers,
        skip_bad_images=skip_bad_images,
        pictures=PICTURES if pictures is not None else 0,
        track=progress,
    )
    found = evaluated.figures
    if output is not None:
        write_figure(output, draw_confusion(found["confusion"], [entry["name"] for entry in found["classes"]]))
    if pictures is not None:
        if not evaluated.samples:
            raise ValueError(f"--pictures is for segmenters; {found['model']} names whole images")
        write_figure(pictures, draw_pictures(evaluated.samples, evaluated.description))
    show_tables([find_task(evaluated.description.task).scores_table(found)], found if json else None)
    if found.get("skipped_images") and not json:
        console.print(f"{found['skipped_images']} bad images left out, such as {found['skipped'][0]}", markup=False)
