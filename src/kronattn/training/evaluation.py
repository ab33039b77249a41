"""How good a trained network is on images whose classes, or masks, are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from kronattn.data.joint import JointSettings
from kronattn.data.transforms import ImageSettings
from kronattn.measure import describe_environment
from kronattn.models.files import Description, load_model
from kronattn.training.classifier import Examination
from kronattn.training.data import Track, TrainingData
from kronattn.training.image_data import ImageData
from kronattn.training.mask_data import MaskData
from kronattn.training.recipe import ClassificationData, SegmentationData
from kronattn.training.run import quiet
from kronattn.training.segmenter import SegmentationExamination

__all__ = ["Evaluated", "evaluate"]


# By task and whether there is a GPU. On a processor small batches stay in its caches: 16 images at 192² go through
# kanet_kv 2.7 times as fast as 256 (one thread).
_BATCH = {
    ("classification", True): 256,
    ("classification", False): 16,
    ("segmentation", True): 8,
    ("segmentation", False): 1,
}


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found: figures for JSON, the network's description, and, of a segmenter, a few samples:
    normalised image, true labels and predicted labels."""

    figures: dict[str, Any]
    description: Description
    samples: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class _How:
    """What all evaluations are asked for."""

    path: str | None
    data: str | None
    split: str
    batch_size: int
    accelerator: str
    precision: str
    workers: int
    skip_bad_images: bool
    pictures: int
    track: Track

    def reading(self, description: Description) -> dict[str, Any]:
        """The settings that all kinds of data have."""
        return {
            "name": self.data or description.data,
            "path": self.path,
            "workers": self.workers,
            "skip_bad_images": self.skip_bad_images,
        }


def evaluate(
    source: str | Path,
    path: str | None,
    *,
    data: str | None = None,
    split: str = "val",
    batch_size: int | None = None,
    accelerator: str = "auto",
    precision: str = "32-true",
    workers: int = 8,
    skip_bad_images: bool = False,
    pictures: int = 0,
    track: Track = lambda items, description: items,
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
    size = batch_size or _BATCH[description.task, accelerator != "cpu" and torch.cuda.is_available()]
    how = _How(path, data, split, size, accelerator, precision, workers, skip_bad_images, pictures, track)
    return (_evaluate_classifier if description.task == "classification" else _evaluate_segmenter)(
        network, description, how
    )


def _evaluate_classifier(network: nn.Module, description: Description, how: _How) -> Evaluated:
    seen: dict[str, Any] = {
        "resize": description.resize,
        "size": description.size,
        "keep_aspect": description.keep_aspect,
    }
    images = ImageSettings(**seen, **_colours(description))
    settings = ClassificationData(images=images, **how.reading(description))
    examination = Examination(network, len(description.classes))
    module = ImageData(settings, how.batch_size, classes=description.classes, track=how.track, split=how.split)
    environment = _examine(examination, module, how)
    found = examination.results()
    confusion = found["confusion"].tolist()
    figures = {
        "model": description.model,
        "data": settings.name,
        "images": sum(map(sum, confusion)),
        "top1": float(found["top1"]),
        "top5": float(found["top5"]),
        "calibration_error": float(found["calibration_error"]),
        "classes": [
            {"name": name, "images": sum(row), "top1": row[index] / sum(row) if sum(row) else None}
            for index, (name, row) in enumerate(zip(description.classes, confusion, strict=True))
        ],
        "confusion": confusion,
        **_left_out(module),
        "environment": environment,
    }
    return Evaluated(figures, description)


def _evaluate_segmenter(network: nn.Module, description: Description, how: _How) -> Evaluated:
    reading = how.reading(description)
    # Other kinds of data know their own ignored label.
    ignored: dict[str, Any] = {"ignore_index": description.ignore_index} if reading["name"] == "folder" else {}
    settings = SegmentationData(images=JointSettings(**_colours(description), **ignored), **reading)
    classes = len(description.classes)
    module = MaskData(settings, how.batch_size, classes=description.classes, track=how.track, split=how.split)
    examination = SegmentationExamination(network, classes, description.ignore_index, how.pictures)
    environment = _examine(examination, module, how)
    found = examination.results()
    confusion = found["confusion"].tolist()
    figures = {
        "model": description.model,
        "data": settings.name,
        "split": how.split,
        "images": len(module.split(how.split)),
        "pixels": sum(map(sum, confusion)),
        "pixel_accuracy": float(found["pixel_accuracy"]),
        "mean_iou": float(found["mean_iou"]),
        "classes": [
            {"name": name, "pixels": sum(row), "iou": iou}
            for name, row, iou in zip(description.classes, confusion, found["class_iou"].tolist(), strict=True)
        ],
        "confusion": confusion,
        **_left_out(module),
        "environment": environment,
    }
    return Evaluated(figures, description, examination.samples)


def _examine(examination: L.LightningModule, module: TrainingData, how: _How) -> dict[str, Any]:
    module.split(how.split)  # what is wrong with the data is said before Lightning starts
    quiet()
    trainer = L.Trainer(
        accelerator=how.accelerator,
        devices=1,
        precision=how.precision,  # type: ignore[arg-type]
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.test(examination, module, verbose=False)
    return describe_environment(trainer.strategy.root_device)


def _colours(description: Description) -> dict[str, Any]:
    return {"mean": tuple(description.mean), "std": tuple(description.std)}


def _left_out(module: TrainingData) -> dict[str, Any]:
    bad = module.bad_images()
    return {"skipped_images": len(bad), "skipped": bad[:20]} if bad else {}
