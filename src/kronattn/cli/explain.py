"""``kronattn explain``: where a position of an image attends, layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kronattn.cli.options import Weights, output_file
from kronattn.cli.output import print_json, say, write_atomically, write_figure
from kronattn.extras import require_library

__all__ = ["explain"]


def explain(
    image: Annotated[Path, typer.Argument(help="An image file.")],
    weights: Weights,
    at: str | None = typer.Option(None, help="The position to look from: x,y in pixels. Default: the centre."),
    layer: str | None = typer.Option(None, help="Attention layers: all, or names or numbers with commas."),
    output: Annotated[
        Path,
        output_file(
            "--output",
            "-o",
            help="Write the picture (.png, .svg) or page (.html) here.",
            suffixes=(".png", ".svg", ".html"),
        ),
    ] = Path("out/explain.png"),
    device: str = typer.Option("auto", help="Where to run: auto, cpu, cuda, cuda:1, mps."),
    json: bool = typer.Option(False, "--json", help="Print the weights as one JSON object too."),
) -> None:
    """Draw the row and column weights of a position, and the map they imply, for KAO_KV, KAO_QKV and regular attention.

    The network's own operator attends as it was trained; the two others see the same features in the same layer.

    Example: kronattn explain church.jpg --weights kanet_kv --at 120,80 --output church.html
    """
    from kronattn.data.images import read_image
    from kronattn.data.prepare import prepare_image, seen_part
    from kronattn.explain import (
        choose_layers,
        draw_layers,
        grid_position,
        look,
        parse_place,
        place_in_part,
        render_explanation,
    )
    from kronattn.measure import resolve_device
    from kronattn.models.files import load_model
    from kronattn.tasks import find_task

    require_library("matplotlib.figure", "explain")
    on = resolve_device(device)
    model, description = load_model(weights)
    task = find_task(description.task)
    task.check_takes_images(description)
    picture = read_image(image)
    place = parse_place(at, picture.width, picture.height)
    # The pass that kronattn predict makes, and what it sees of the image.
    cut = task.cut
    prepared = prepare_image(picture, description, cut=cut).unsqueeze(0).to(on)
    part = seen_part(picture, description, cut=cut)
    place = place_in_part(place, (part.width / picture.width, part.height / picture.height))
    picture = part
    scores, comparisons = look(model.to(on), prepared)
    chosen = choose_layers(comparisons, layer)
    predicted = task.describe_prediction(scores[0].float().cpu(), description.classes, place)
    if output.suffix.lower() in (".html", ".htm"):
        lead = f"{description.model} looks at the image from the marked position. {predicted}"
        page = render_explanation(picture, chosen, place, title=f"Where attention looks: {image.name}", lead=lead)
        write_atomically(output, page)
    else:
        write_figure(output, draw_layers(picture, chosen, place, caption=f"{description.model}. {predicted}"))
    if not json:
        say(predicted, f"Explanation: {output}")
        return
    layers = []
    for one in chosen:
        position = grid_position(place, one.grid)
        weights_of = {mode: call.at(*position) for mode, call in one.calls.items()}
        operators = {
            mode: {"rows": weight.rows[0].tolist(), "columns": weight.columns[0].tolist(), "total": weight.total}
            for mode, weight in weights_of.items()
        }
        grid, where = list(one.grid), list(position)
        layers.append({"layer": one.name, "own": one.own, "grid": grid, "position": where, "operators": operators})
    found = {"image": str(image), "model": description.model, "prediction": predicted, "output": str(output)}
    print_json(found | {"seen": list(prepared.shape[2:]), "layers": layers})
