"""The report's section on what a trained network looks at, on a real photograph."""

from __future__ import annotations

import importlib.util

from kronattn.report.section import Content, Drawing, Settings

__all__ = ["build"]

_NETWORK = "kanet_kv"
# In the sky, left of the temple: the rows and columns of sky should light up.
_PLACE = (0.2, 0.15)


def build(settings: Settings) -> Content:
    """Send a photograph through the packaged network and draw one position's attention."""
    missing = [name for name in ("torchvision", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        return Content(f"Not drawn here: {', '.join(missing)} missing, pip install 'kronattn[vision]'.")
    from kronattn.data.images import read_image
    from kronattn.data.photographs import CREDITS, photographs
    from kronattn.data.prepare import prepare_image, seen_part
    from kronattn.explain import choose_layers, draw_layers, look
    from kronattn.models.files import load_model
    from kronattn.tasks import find_task

    found = photographs()
    if not found:
        return Content("Not drawn here: no photograph is at hand, pip install 'kronattn[train]'.")
    photograph = found[0]
    model, description = load_model(_NETWORK)
    image = read_image(photograph)
    images = prepare_image(image, description).unsqueeze(0).to(settings.device)
    scores, comparisons = look(model.to(settings.device), images)
    predicted = find_task(description.task).describe_prediction(scores[0].float().cpu(), description.classes, _PLACE)
    layers = choose_layers(comparisons, "0" if settings.quick else "0,4")
    drawing = Drawing(
        draw_layers(seen_part(image, description), layers, _PLACE),
        f"Where the marked position attends, by row, by column and as a map ({CREDITS[photograph.name]}).",
        "A photograph under maps of attention, with row and column weights along its edges, for three operators",
    )
    introduction = (
        f"The {_NETWORK} that comes with the package, trained on ten classes of Imagenette, looks at a photograph. "
        f"{predicted} Kronecker attention gives a weight to each row and each column, and what they imply is their "
        "sum; regular attention, on the same features, could pick single positions."
    )
    return Content(introduction, [], [drawing])
