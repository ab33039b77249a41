"""``kronattn predict``: what a trained network says about images."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kronattn.cli.options import Json, Quiet, Weights, output_file, show_tables
from kronattn.cli.output import check_writable, console, progress, say, write_atomically, write_json

if TYPE_CHECKING:
    from PIL import Image

    from kronattn.models.files import Description
    from kronattn.predict.run import Result

__all__ = ["predict"]


def predict(
    images: Annotated[list[Path], typer.Argument(help="Image files, and folders of them.")],
    weights: Weights,
    top: int = typer.Option(5, min=1, help="How many classes to give for each image."),
    batch: int = typer.Option(16, min=1, help="Images in a batch."),
    device: str = typer.Option("auto", help="Where to run: auto, cpu, cuda, cuda:1, mps."),
    output: Annotated[
        Path | None,
        output_file(
            "--output", "-o", help="Write the predictions into this file, .csv or .json.", suffixes=(".csv", ".json")
        ),
    ] = None,
    overlays: Path = typer.Option(Path("out/overlays"), help="Segmentation: the folder for pictures."),
    masks: Path = typer.Option(Path("out/masks"), help="Segmentation: the folder for labels, as palette images."),
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Classify images, or segment them and draw the classes over them, as the network's weights say.

    A file that cannot be read is named on standard error, the others go on, and the exit code is then 1.

    Example: kronattn predict photos/ church.jpg --weights kanet_kv --top 3 --output found.csv
    """
    from kronattn.measure import resolve_device
    from kronattn.models.files import load_model
    from kronattn.predict.inputs import list_images
    from kronattn.predict.run import predict_files
    from kronattn.predict.write import results_csv, results_json, results_table
    from kronattn.tasks import find_task

    on = resolve_device(device)
    model, description = load_model(weights)
    task = find_task(description.task)
    task.check_takes_images(description)
    if task.draws and overlays.resolve() == masks.resolve():
        raise ValueError(f"--overlays and --masks are both {masks}, where files of one name would go: give two folders")
    if task.draws:
        for option, folder in (("--overlays", overlays), ("--masks", masks)):
            check_writable(folder / "picture.png", option)
    paths = list_images(images)
    track = partial(progress, description="Predicting")
    results: list[Result] = []
    written: dict[Path, dict[str, str]] = {}
    for result in predict_files(paths, model, description, top=top, batch=batch, device=on, track=track):
        if result.error and len(paths) == 1:
            raise ValueError(result.error)
        if result.error:
            print(f"kronattn: skipped: {result.error}", file=sys.stderr)
        if result.picture is not None and result.mask is not None:
            # Numbered, since images in two folders may have one name; and not kept, since there may be thousands.
            name = f"{len(results):04d}-{result.path.stem}.png"
            write_atomically(overlays / name, _png(result.picture))
            write_atomically(masks / name, _png(result.mask))
            written[result.path] = {"overlay": str(overlays / name), "mask": str(masks / name)}
            result = replace(result, picture=None, mask=None)
        results.append(result)
    if written:
        _write_legend(description, overlays, masks)
    found = results_json(results, description, written)
    if output is not None and output.suffix.lower() == ".csv":
        write_atomically(output, results_csv(results))
    elif output is not None:
        write_json(output, found)
    show_tables([results_table(results, description)], found if json else None)
    if written and not json:
        _print_legend(description)
        say(f"Overlays: {overlays}", f"Masks: {masks}")
    if any(result.error for result in results):
        raise typer.Exit(1)


def _write_legend(description: Description, overlays: Path, masks: Path) -> None:
    """What the colours mean: a picture beside the overlays, a text beside the masks, which training could read."""
    from kronattn.data.mask_classes import classes_text
    from kronattn.present.legend import colours_of, draw_legend

    names = description.classes
    if names:
        colours = colours_of(description, len(names))
        write_atomically(overlays / "legend.png", _png(draw_legend(names, colours)))
        write_atomically(masks / "classes.txt", classes_text(names, colours))


def _print_legend(description: Description) -> None:
    from rich.text import Text

    from kronattn.present.legend import colours_of

    line = Text()
    names = description.classes
    for name, (red, green, blue) in zip(names, colours_of(description, len(names)), strict=True):
        line.append("■", style=f"rgb({red},{green},{blue})").append(f" {name}  ")
    console.print(line)


def _png(picture: Image.Image) -> bytes:
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()
