"""How good a trained network is on images whose classes, or masks, are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from kronattn.data.decoded import Track, untracked
from kronattn.measure import describe_environment
from kronattn.models.files import Description, load_model
from kronattn.tasks import Task, find_task
from kronattn.training.data import load_data_module
from kronattn.training.interruption import interruptible
from kronattn.training.recipe import data_settings
from kronattn.training.run import quiet

__all__ = ["Evaluated", "evaluate"]


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found: figures for JSON, the network's description, and, of a segmenter, a few samples:
    normalised image, true labels and predicted labels."""

    figures: dict[str, Any]
    description: Description
    samples: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


def evaluate(
    source: str | Path,
    path: str | None,
    *,
    data: str | None = None,
    split: str = "val",
    batch_size: int | None = None,
    accelerator: str = "auto",
    precision: Any = "32-true",
    workers: int = 8,
    skip_bad_images: bool = False,
    pictures: int = 0,
    track: Track = untracked,
) -> Evaluated:
    """Examine a network on one split of a dataset.

    Args:
        source: a ``.safetensors`` or ``.ckpt`` file, or the name of a network that comes with weights.
        path: where the images lie.
        data: which kind of dataset; the one that the network was trained on by default.
        split: which part of it.
        pictures: how many samples of a segmenter to hand back.

    Returns:
        For a classifier ``top1``, ``top5``, ``calibration_error`` (expected, 15 bins), ``classes`` (each with its
        accuracy and count) and ``confusion`` (rows: true); for a segmenter ``pixel_accuracy``, ``mean_iou``,
        ``classes`` (each with its IoU and pixels) and ``confusion``.
    """
    network, description = load_model(source)
    task = find_task(description.task)
    name = data or description.data
    reading: dict[str, Any] = {"name": name, "path": path, "workers": workers, "skip_bad_images": skip_bad_images}
    settings = data_settings(task)(images=task.evaluated(description, name), **reading)  # type: ignore[call-arg]
    on_gpu = accelerator != "cpu" and torch.cuda.is_available()
    module = load_data_module(task)(
        settings, batch_size or task.at_once[not on_gpu], classes=description.classes, track=track, split=split
    )
    samples = module.split(split)  # what is wrong with the data is said before Lightning starts
    evaluator = _Evaluator(network, task, description, pictures if task.draws else 0)
    quiet()
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=1,
        precision=precision,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with interruptible(trainer):
        trainer.test(evaluator, module, verbose=False)
    found = {metric: value.tolist() for metric, value in evaluator.results().items()}
    bad = module.bad_images()
    figures = {
        "model": description.model,
        "data": name,
        "split": split,
        "images": len(samples),
        **task.report(found, description),
        "confusion": found["confusion"],
        **({"skipped_images": len(bad), "skipped": bad[:20]} if bad else {}),
        "environment": describe_environment(trainer.strategy.root_device),
    }
    return Evaluated(figures, description, evaluator.samples)


class _Evaluator(L.LightningModule):
    """A trained network's metrics on labelled samples, and the first few predictions to look at."""

    def __init__(self, network: nn.Module, task: Task, description: Description, pictures: int) -> None:
        super().__init__()
        self.network, self.task, self.pictures = network, task, pictures
        self.metrics = task.all_metrics(description)
        self.samples: list[tuple[Tensor, Tensor, Tensor]] = []

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, target = batch
        predicted = self.task.predicted(self.network(images))
        self.metrics.update(predicted, target)
        for image, truth, found in zip(images, target, predicted, strict=True):
            if len(self.samples) < self.pictures:
                self.samples.append((image.float().cpu(), truth.cpu(), found.cpu()))

    def results(self) -> dict[str, Tensor]:
        """The metrics, each over all samples."""
        return {name: torch.as_tensor(value).cpu() for name, value in self.metrics.compute().items()}
