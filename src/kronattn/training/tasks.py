"""What a network can learn here. A new task is one entry: its recipe, its data, its module, and what counts as good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from kronattn.models.files import Description
from kronattn.training.classifier import Classifier
from kronattn.training.data import TrainingData
from kronattn.training.image_data import ImageData
from kronattn.training.learner import Learner
from kronattn.training.mask_data import MaskData
from kronattn.training.recipe import Recipe
from kronattn.training.segmenter import Segmenter

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


def _described(recipe: Recipe, data: TrainingData, **more: Any) -> Description:
    classes = data.class_names()
    images = recipe.data.images
    return Description(
        model=recipe.model.name,
        options={**recipe.model.all_options, "num_classes": len(classes)},
        classes=classes,
        mean=list(images.mean),
        std=list(images.std),
        task=recipe.task,
        data=recipe.data.name,
        **more,
    )


TASKS = {
    "classification": Task(ImageData, Classifier, _describe_classifier, "top1", "top-1"),
    "segmentation": Task(MaskData, Segmenter, _describe_segmenter, "mean_iou", "mean IoU"),
}
