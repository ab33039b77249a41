"""What a network can learn here. A new task is one entry: its recipe, its data, its module, and what counts as good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from kronattn.data.volumes import IGNORED
from kronattn.models.files import Description
from kronattn.training.classifier import Classifier
from kronattn.training.data import TrainingData
from kronattn.training.image_data import ImageData
from kronattn.training.learner import Learner
from kronattn.training.mask_data import MaskData
from kronattn.training.recipe import Recipe
from kronattn.training.segmenter import Segmenter
from kronattn.training.spectrogram_data import SpectrogramPictures
from kronattn.training.volume_data import VolumeBatches
from kronattn.training.volume_segmenter import VolumeSegmenter

__all__ = ["TASKS", "Task"]


@dataclass(frozen=True)
class Task:
    """How a task is trained.

    ``score`` is the figure by which networks are judged, among those that the module logs as ``val/...``; ``label`` is
    what readers call it. ``describe(recipe, data)`` gives what a trained network needs to be used.
    """

    data: type[TrainingData]
    module: Callable[[nn.Module, Recipe, Description], Learner]
    describe: Callable[[Recipe, Any], Description]
    score: str
    label: str


def _describe_classifier(recipe: Recipe, data: ImageData) -> Description:
    images = data.images
    seen = {"resize": images.evaluated_resize, "size": images.evaluated_size, "keep_aspect": images.keep_aspect}
    return _described(recipe, data, **seen)


def _describe_segmenter(recipe: Recipe, data: MaskData) -> Description:
    labels, crop = data.labels, data.settings.images.crop
    colours = [list(colour) for colour in labels.colours()]
    return _described(recipe, data, resize=crop, size=crop, ignore_index=labels.ignore_index, palette=colours)


def _describe_spectrograms(recipe: Recipe, data: SpectrogramPictures) -> Description:
    size = list(data.images.size)
    return _described(recipe, data, in_chans=1, shape=[1, *size], resize=max(size), size=max(size))


def _describe_volumes(recipe: Recipe, data: VolumeBatches) -> Description:
    crop = list(data.images.crop)
    # Each volume is standardised by itself: nothing is left to subtract.
    return _described(
        recipe, data, shape=[1, *crop], resize=max(crop), size=max(crop), ignore_index=IGNORED, mean=[0.0], std=[1.0]
    )


def _described(recipe: Recipe, data: TrainingData, in_chans: int | None = None, **more: Any) -> Description:
    classes = data.class_names()
    images = recipe.data.images
    options: dict[str, Any] = {**recipe.model.all_options, "num_classes": len(classes)}
    if in_chans is not None:
        options["in_chans"] = in_chans
    colours: dict[str, Any] = {} if "mean" in more else {"mean": list(images.mean), "std": list(images.std)}
    return Description(
        model=recipe.model.name,
        options=options,
        classes=classes,
        **colours,
        task=recipe.task,
        data=recipe.data.name,
        **more,
    )


TASKS = {
    "classification": Task(ImageData, Classifier, _describe_classifier, "top1", "top-1"),
    "segmentation": Task(MaskData, Segmenter, _describe_segmenter, "mean_iou", "mean IoU"),
    "spectrograms": Task(SpectrogramPictures, Classifier, _describe_spectrograms, "top1", "top-1"),
    "volumes": Task(VolumeBatches, VolumeSegmenter, _describe_volumes, "dice", "mean Dice"),
}
