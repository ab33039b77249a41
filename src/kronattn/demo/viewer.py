"""What the page shows, without the page: a network's classes for an image, and views of its attention."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from PIL import Image

from kronattn.data.images import BadImage, read_image
from kronattn.data.prepare import prepare_image, seen_part
from kronattn.explain.operators import LABELS, Comparison, look
from kronattn.explain.place import grid_position
from kronattn.explain.view import draw_view
from kronattn.inference import fuse_known
from kronattn.nn.grid_attention import GridAttention
from kronattn.tasks import find_task

if TYPE_CHECKING:
    from torch import nn

    from kronattn.models.files import Description

__all__ = ["MAX_SIDE", "Seen", "Viewer"]

# Pixels along one side of an upload; the page shows a fraction of it.
MAX_SIDE = 8192
_SHOWN = 1024
_CLASSES = 5


@dataclass(frozen=True)
class Seen:
    """An image that went through the network: a smaller copy of what the network saw of it, its classes with their
    probabilities (a segmenter's with their part of the area), and each layer's attention."""

    image: Image.Image
    shares: dict[str, float]
    comparisons: Sequence[Comparison]


class Viewer:
    """A trained network whose attention can be looked at."""

    def __init__(self, model: nn.Module, description: Description) -> None:
        # Attention layers stay modules: they are what is looked at.
        self.model = fuse_known(model, attention=False)
        self.description = description
        self.layers = [name for name, layer in model.named_modules() if isinstance(layer, GridAttention)]
        # What records listens to the one model: two visitors at once would hear each other.
        self._one_at_a_time = threading.Lock()
        if not self.layers:
            raise ValueError(f"{description.model} has no attention layer: there is nothing to look at")

    @property
    def own(self) -> str:
        """The operator of the network's first attention layer."""
        layer = self.model.get_submodule(self.layers[0])
        return getattr(layer, "mode", "regular")

    def look(self, path: str) -> Seen:
        """Send an image file through the network."""
        image = read_image(path)
        if max(image.size) > MAX_SIDE:
            raise BadImage(f"the image is {image.width}×{image.height}: at most {MAX_SIDE} on a side, please")
        task = find_task(self.description.task)
        with self._one_at_a_time, torch.inference_mode():
            output, comparisons = look(self.model, prepare_image(image, self.description, cut=task.cut)[None])
        shown = seen_part(image, self.description, cut=task.cut)
        shown.thumbnail((_SHOWN, _SHOWN))
        found = task.interpret(output[0].float().cpu(), shown, self.description, _CLASSES)
        return Seen(shown, {one.name: one.share for one in found.classes}, comparisons)

    def view(self, seen: Seen, layer: int, mode: str, place: tuple[float, float]) -> tuple[Image.Image, str]:
        """The picture of one layer with one operator, and a line about it."""
        comparison = seen.comparisons[layer]
        # Regular attention is left out where the grid is too large for it.
        mode = mode if mode in comparison.calls else comparison.own
        call = comparison.calls[mode]
        row, column = grid_position(place, call.grid)
        own = "the network's own operator" if mode == comparison.own else "not trained here, on the same features"
        weights = call.at(row, column)
        strongest = int(weights.rows[0].mean(dim=0).argmax()), int(weights.columns[0].mean(dim=0).argmax())
        text = (
            f"{LABELS[mode]} in {comparison.name} ({own}): position row {row}, column {column} of "
            f"{call.grid[0]}×{call.grid[1]} attends most to row {strongest[0]} and column {strongest[1]}."
        )
        return draw_view(seen.image, call, place), text
