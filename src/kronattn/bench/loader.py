"""Whether data holds training back: a recipe's images a second against the same steps on one batch again and again."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kronattn.training.data import Track
from kronattn.training.image_data import ImageData
from kronattn.training.recipe import ClassificationData, Recipe
from kronattn.training.run import train

__all__ = ["bench_loader"]


class OneBatch(ImageData):
    """Data that costs nothing: the first batch, prepared once."""

    _kept: tuple[Tensor, Tensor] | None = None

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        assert self.trainer is not None
        if not self.trainer.training:
            return super().on_after_batch_transfer(batch, dataloader_idx)
        if self._kept is None:
            self._kept = super().on_after_batch_transfer(batch, dataloader_idx)
        return self._kept


def bench_loader(recipe: Recipe, *, epochs: int = 4, track: Track = lambda items, description: items) -> dict[str, Any]:
    """Train a few epochs with the recipe's data and with none, and compare; the first epoch is left out.

    Returns:
        ``images_per_second`` and ``without_data``, their ratio ``kept`` (1: data costs nothing), and the share of the
        time in which the loop waited for the next batch.
    """
    assert isinstance(recipe.data, ClassificationData)
    short = replace(recipe, epochs=epochs)
    with tempfile.TemporaryDirectory() as folder:
        real = train(short, folder=Path(folder) / "real", track=track)
        free = train(short, folder=Path(folder) / "free", track=track, data_module=OneBatch)
    return {
        "model": recipe.model.name,
        "data": recipe.data.name,
        "size": recipe.data.images.size,
        "batch_size": recipe.batch_size,
        "images_per_second": real["images_per_second"],
        "without_data": free["images_per_second"],
        "kept": round(real["images_per_second"] / free["images_per_second"], 3),
        "waiting_for_data": real["waiting_for_data"],
        "environment": real["environment"],
    }
