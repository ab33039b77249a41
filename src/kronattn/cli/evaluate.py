"""``kronattn evaluate``: how good a trained network is."""

from __future__ import annotations

from pathlib import Path

import typer

from kronattn.cli.output import check_figure, console, print_json, progress, write_figure

__all__ = ["evaluate"]

PICTURES = 6


def evaluate(
    checkpoint: str = typer.Argument(help="A .safetensors or .ckpt file, or a network that comes with weights."),
    data: str | None = typer.Option(None, help="Where the images lie: a folder, a .tar, a pattern."),
    dataset: str | None = typer.Option(None, help="Its kind. Default: the one that the network was trained on."),
    split: str = typer.Option("val", help="Which part of it."),
    batch: int | None = typer.Option(None, min=1, help="Images in a batch. Default: by task and device."),
    accelerator: str = typer.Option("auto", help="auto, cpu or gpu."),
    precision: str = typer.Option("32-true", help="32-true, bf16-mixed or 16-mixed."),
    workers: int = typer.Option(8, min=0, help="Processes that decode, where images are not kept in memory."),
    skip_bad_images: bool = typer.Option(False, "--skip-bad-images", help="Leave them out and count them."),
    output: Path | None = typer.Option(None, help="Draw the confusion matrix into this file, .png or .svg."),
    pictures: Path | None = typer.Option(None, help="Of a segmenter: draw predictions into this file, .png or .svg."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """Top-1, top-5, calibration and each class's accuracy; of a segmenter pixel accuracy and each class's IoU.

    Example: kronattn evaluate kanet_kv --data imagenette-144-val.tar
    """
    from kronattn.training.evaluation import evaluate as examine

    if output is not None:
        check_figure(output)
    if pictures is not None:
        check_figure(pictures, "--pictures")
    evaluated = examine(
        checkpoint,
        data,
        data=dataset,
        split=split,
        batch_size=batch,
        accelerator=accelerator,
        precision=precision,
        workers=workers,
        skip_bad_images=skip_bad_images,
        pictures=PICTURES if pictures is not None else 0,
        track=progress,
    )
    found = evaluated.figures
    if output is not None:
        from kronattn.training.figures import draw_confusion

        write_figure(output, draw_confusion(found["confusion"], [entry["name"] for entry in found["classes"]]))
    if pictures is not None:
        from kronattn.training.figures import draw_pictures

        if not evaluated.samples:
            raise ValueError(f"--pictures is for segmenters; {found['model']} names whole images")
        write_figure(pictures, draw_pictures(evaluated.samples, evaluated.description))
    if json:
        print_json(found)
        return
    from kronattn.tables.rendering import to_rich
    from kronattn.tables.training import scores_table

    console.print(to_rich(scores_table(found), width=console.width))
    if found.get("skipped_images"):
        console.print(f"{found['skipped_images']} bad images left out, such as {found['skipped'][0]}", markup=False)
