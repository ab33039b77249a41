"""Image files through a trained network, batch by batch; a bad file is a result too and stops nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kronattn.data.images import read_image
from kronattn.data.prepare import prepare_image
from kronattn.inference import fuse_known
from kronattn.tasks import Finding, find_task

if TYPE_CHECKING:
    from PIL import Image

    from kronattn.models.files import Description

__all__ = ["Result", "predict_files"]

_READERS = 4


@dataclass(frozen=True)
class Result:
    """What was found in one file: classes with their shares, largest first; or, in one line, why nothing was.

    ``picture`` is an overlay for segmentation, ``mask`` its labels as a palette image; None for classification.
    """

    path: Path
    classes: list[Finding] = field(default_factory=list)
    error: str | None = None
    picture: Image.Image | None = None
    mask: Image.Image | None = None


def predict_files(
    paths: Sequence[Path],
    model: nn.Module,
    description: Description,
    *,
    top: int = 5,
    batch: int = 16,
    device: str | torch.device = "cpu",
    track: Callable[[Sequence[Sequence[Path]]], Iterable[Sequence[Path]]] = lambda items: items,
) -> Iterator[Result]:
    """Yield a :class:`Result` for each file, in order.

    Args:
        paths: of image files.
        model: from :func:`kronattn.models.files.load_model`.
        description: the model's; its task says what to do with the model's output.
        top: how many classes to give for each image.
        batch: images that go through the network at once.
        device: where it runs.
        track: wraps the loop over batches, in a progress bar for instance.
    """
    task = find_task(description.task)
    task.check_takes_images(description)
    model = model.to(device).eval()
    if torch.device(device).type == "cpu":
        model = fuse_known(model)
    batches = [paths[start : start + batch] for start in range(0, len(paths), batch)]
    with ThreadPoolExecutor(_READERS) as readers:
        for part in track(batches):
            read = list(readers.map(partial(_read, description=description, cut=task.cut), part))
            outputs = _through(model, [one[1] for one in read if not isinstance(one, str)], device)
            for path, one in zip(part, read, strict=True):
                output = one if isinstance(one, str) else next(outputs)
                if isinstance(one, str) or isinstance(output, str):
                    yield Result(path, error=one if isinstance(one, str) else f"{path}: {output}")
                else:
                    found = task.interpret(output, one[0], description, top)
                    yield Result(path, found.classes, picture=found.picture, mask=found.mask)


def _read(path: Path, description: Description, cut: str) -> tuple[Image.Image, Tensor] | str:
    try:
        image = read_image(path)
        return image, prepare_image(image, description, cut=cut)
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())


def _through(model: nn.Module, images: Sequence[Tensor], device: str | torch.device) -> Iterator[Tensor | str]:
    """One output for each image, in order; neighbours of one size go through together. For those of a size that the
    network refuses, what it says of it."""
    start = 0
    while start < len(images):
        end = start
        while end < len(images) and images[end].shape == images[start].shape:
            end += 1
        together = torch.stack(list(images[start:end]))
        try:
            with torch.inference_mode():
                yield from model(together.to(device)).float().cpu()
        except ValueError as error:
            yield from [" ".join(str(error).split())] * len(together)
        start = end
