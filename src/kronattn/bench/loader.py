"""Whether data holds training back: epochs with a recipe's data, by turns with epochs on one batch again and again."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from kronattn.data.decoded import Track, untracked
from kronattn.tasks import find_task
from kronattn.training.callbacks import EpochSpeed, Speed
from kronattn.training.data import TrainingData, load_data_module
from kronattn.training.recipe import Recipe
from kronattn.training.run import train

__all__ = ["bench_loader"]


class _EveryOther(TrainingData):
    """Data as it is in even epochs; in odd ones the last batch of the epoch before, which costs nothing.

    By turns within one run, so that both meet the same network, compiled once, and the same machine.
    """

    _kept: Any = None

    def costs_nothing(self) -> bool:
        return bool(self._epoch() % 2)

    def train_dataloader(self) -> Any:
        return _Batches(self, super().train_dataloader())

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        if not self.trainer.training:
            return super().on_after_batch_transfer(batch, dataloader_idx)
        if self.costs_nothing():
            return self._kept
        given = super().on_after_batch_transfer(batch, dataloader_idx)
        if not self.prepared_in_step:
            self._kept = given
        elif self.trainer.is_last_batch:
            with torch.no_grad():
                self._kept = super().prepare_training(batch)
        return given

    def prepare_training(self, batch: Any) -> Any:
        # What is prepared already has fractions; numbers of samples and bytes have none.
        return batch if batch[0].is_floating_point() else super().prepare_training(batch)


class _Batches:
    def __init__(self, data: _EveryOther, loader: Any) -> None:
        self.data, self.loader = data, loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        return repeat(self.data._kept, len(self)) if self.data.costs_nothing() else iter(self.loader)


def bench_loader(recipe: Recipe, *, epochs: int = 4, track: Track = untracked) -> dict[str, Any]:
    """Train a few epochs with the recipe's data and as many with none, by turns; the first of each is left out.

    Returns:
        ``images_per_second`` and ``without_data``; ``kept``, the median of their ratio over pairs of epochs (1: data
        costs nothing), and the ratios of all ``pairs``; and the share of the time in which the loop waited for the next
        batch.
    """
    speed = Speed()
    short = replace(recipe, epochs=2 * epochs, iterations=None, validate_every=2 * epochs)
    by_turns = type("EveryOther", (_EveryOther, load_data_module(find_task(recipe.task))), {})
    with tempfile.TemporaryDirectory() as folder:
        result = train(short, folder=Path(folder) / "run", track=track, callbacks=[speed], data_module=by_turns)
    images = recipe.data.images
    real, free = speed.epochs[2::2], speed.epochs[3::2]
    pairs = [one.images_per_second / other.images_per_second for one, other in zip(real, free, strict=True)]
    return {
        "model": recipe.model.name,
        "data": recipe.data.name,
        "size": images.size if hasattr(images, "size") else images.crop,
        "batch_size": recipe.batch_size,
        "images_per_second": round(EpochSpeed.of_all(real).images_per_second, 1),
        "without_data": round(EpochSpeed.of_all(free).images_per_second, 1),
        "kept": round(statistics.median(pairs), 3),
        "pairs": [round(pair, 3) for pair in pairs],
        "waiting_for_data": round(EpochSpeed.of_all(real).waiting, 4),
        "environment": result["environment"],
    }
