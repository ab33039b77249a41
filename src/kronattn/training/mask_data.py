"""Images with masks for Lightning: from their files to normalised batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kronattn.data.images import BadImage
from kronattn.data.joint import (
    JointSettings,
    SegmentationDataset,
    collate_padded,
    joint_evaluation_transform,
    joint_training_transform,
)
from kronattn.data.masks import Labels
from kronattn.data.segmentation import SegmentedImages, load_segmentation
from kronattn.training.data import TrainingData

__all__ = ["MaskData"]


class MaskData(TrainingData):
    """Images with a label for each pixel: random scales, crops and flips in training, whole images in evaluation.

    Where they fit they are decoded once and kept; worker processes transform them either way.
    """

    @property
    def labels(self) -> Labels:
        """The classes, the ignored label and the colours."""
        return next(iter(self._splits.values()) if self._splits else iter([self.split("train")])).labels

    def class_names(self) -> list[str]:
        return list(self.labels.classes)

    def load(self, split: str) -> SegmentedImages:
        if self.settings.path is None:
            raise ValueError(f"the dataset {self.settings.name!r} needs to know where it lies: give --data PATH")
        ignored = self.settings.images.ignore_index
        found = load_segmentation(self.settings.name, self.settings.path, split, ignore_index=ignored)
        if ignored not in (found.labels.ignore_index, JointSettings.ignore_index):
            raise ValueError(
                f"data.images.ignore_index is {ignored}, but {self.settings.name} ignores {found.labels.ignore_index}"
            )
        if self.classes is not None and list(found.labels.classes) != list(self.classes):
            raise ValueError(
                f"the data's classes are {_some(found.labels.classes)}, but the network's are {_some(self.classes)}"
            )
        return found

    def build(self, split: str) -> SegmentationDataset:
        images = self.split(split)
        settings = replace(self.settings.images, ignore_index=self.labels.ignore_index)
        transform = (joint_training_transform if split == "train" else joint_evaluation_transform)(settings)
        dataset = SegmentationDataset(images, transform, skip_bad=self.settings.skip_bad_images)
        if self.keeps(len(images) * _bytes_of_one(images)):
            dataset.keep(self.track)
        return dataset

    def collate(self, samples: list[Any]) -> Any:
        return collate_padded(samples, self.labels.ignore_index)

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        images, masks = batch
        return images.to(memory_format=self.memory_format), masks.to(torch.int64)


def _bytes_of_one(images: SegmentedImages) -> int:
    """What the first pair takes when decoded: the others of a dataset are about as large."""
    try:
        return 4 * images.pair(0)[1].size
    except BadImage:
        return 0  # whoever decodes it next says what is wrong with it


def _some(classes: Any) -> str:
    return ", ".join(list(classes)[:4]) + (", ..." if len(classes) > 4 else "")
