"""``kronattn export``: a network for other runtimes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kronattn.cli.options import WEIGHTS_HELP, Quiet, given_network
from kronattn.cli.output import check_writable, measuring, print_json, say, write_atomically

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kronattn.models.files import Description

__all__ = ["export"]

_SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}


def export(
    network: str | None = typer.Argument(None, help="The same as --weights.", show_default=False),
    weights: str | None = typer.Option(None, "--weights", "-w", help=f"{WEIGHTS_HELP} Others are exported untrained."),
    format: str = typer.Option("onnx", help="onnx or torch-export."),
    dynamic: bool = typer.Option(False, "--dynamic", help="Any batch, height and width rather than one image's."),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="Write into this file. Default: the network's name in out/."
    ),
    int8: str | None = typer.Option(None, help="Quantise an ONNX file to 8 bits: static or dynamic."),
    calibrate: Path | None = typer.Option(None, help="Folder of images that --int8 static takes its ranges from."),
    images: int = typer.Option(64, min=1, help="How many of them."),
    accuracy: Path | None = typer.Option(None, help="Folder of CLASS/IMAGE to measure accuracy on, before and after."),
    quiet: Quiet = False,
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of text."),
) -> None:
    """Write a network as ONNX or as an exported PyTorch program, checked against PyTorch before anything is written.

    With --dynamic it is checked at 224×224, 192×256 and 320×320; a difference above 1e-4 of the largest output is
    refused.

    Example: kronattn export --weights kanet_kv --dynamic --output kanet_kv.onnx
    """
    network = given_network(network, weights)
    from kronattn.export import FORMATS, export_network, find_network
    from kronattn.export.runtime import require_onnx

    if format not in FORMATS:
        raise ValueError(f"--format must be {' or '.join(FORMATS)}, not {format!r}")
    if format == "onnx":
        require_onnx()
    if int8 is not None and format != "onnx":
        raise ValueError("--int8 is for --format onnx")
    if int8 == "static" and calibrate is None:
        raise ValueError("--int8 static needs --calibrate FOLDER, the images that ranges are taken from")
    output = output or Path("out") / (Path(network).stem + _SUFFIXES[format])
    if output.suffix.lower() != _SUFFIXES[format] and not output.is_dir():
        raise ValueError(f"--output must end in {_SUFFIXES[format]} for --format {format}, got {output}")
    check_writable(output)
    model, description, trained = find_network(network)
    if not trained:
        print(f"kronattn: note: {network} comes without weights and is exported untrained", file=sys.stderr)
    exported = export_network(model, description, format=format, dynamic=dynamic)
    found: dict[str, Any] = {
        "model": description.model,
        "format": format,
        "dynamic": dynamic,
        "output": str(output),
        "differences": [one.to_json() for one in exported.differences],
        "bytes": len(exported.content),
    }
    lines = [f"Largest difference from PyTorch: {one}" for one in exported.differences]
    content = exported.content
    if int8 is not None or accuracy is not None:
        content, more, said = _smaller(model, description, content, int8, calibrate, images, accuracy, dynamic)
        found |= more
        lines += said
    write_atomically(output, content)
    if json:
        print_json(found)
        return
    say(*lines, f"Written: {output}, {len(content) / 1e6:.1f} MB")


def _smaller(
    model: nn.Module,
    description: Description,
    content: bytes,
    int8: str | None,
    calibrate: Path | None,
    images: int,
    accuracy: Path | None,
    dynamic: bool,
) -> tuple[bytes, dict[str, Any], list[str]]:
    """Quantise and measure as asked: the new content, what goes into the JSON object, what is printed."""
    from kronattn.export.quantise import labelled_images, measure_accuracy, prepared_batches, quantise
    from kronattn.export.runtime import run_onnx
    from kronattn.predict.inputs import list_images

    if accuracy is not None and description.task != "classification":
        raise ValueError(f"--accuracy is for classification, and {description.model} is for {description.task}")
    runs: dict[str, Any] = {"pytorch": model}
    found: dict[str, Any] = {}
    lines = []
    if int8 is not None:
        batches: Iterable[Tensor] = ()
        if int8 == "static":
            assert calibrate is not None
            paths = list_images([calibrate])
            # Spread over the folder, which is often sorted by class.
            chosen = paths[:: max(1, len(paths) // images)][:images]
            batches = prepared_batches(chosen, description, 1)
        before, content = len(content), quantise(content, int8, batches)
        runs["int8"] = run_onnx(content)
        found |= {"int8": int8, "bytes": len(content)}
        lines.append(f"8 bits: {before / 1e6:.1f} MB to {len(content) / 1e6:.1f} MB")
    if accuracy is not None:
        labelled = labelled_images(accuracy, description.classes)
        found["accuracy_images"] = len(labelled)
        found["accuracy"] = {
            name: measure_accuracy(run, labelled, description, batch=16 if dynamic else 1, track=measuring)
            for name, run in runs.items()
        }
        listed = ", ".join(f"{name} {value:.2%}" for name, value in found["accuracy"].items())
        lines.append(f"Top-1 on {len(labelled):,} images: {listed}")
    return content, found, lines
