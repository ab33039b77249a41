"""Images with masks for Lightning: from their files to normalised batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kronattn.data.augment import normalise
from kronattn.data.cache import Decoded, fingerprint
from kronattn.data.decoded import good_samples
from kronattn.data.images import BadImage
from kronattn.data.joint import (
    JointSettings,
    SegmentationDataset,
    collate_padded,
    joint_evaluation_transform,
    joint_training_transform,
)
from kronattn.data.joint_augment import random_scaled_crop
from kronattn.data.masks import Labels
from kronattn.data.pairs import DecodedPairs, stack_pairs
from kronattn.data.segmentation import SegmentedImages, load_segmentation
from kronattn.training.data import TrainingData

__all__ = ["MaskData"]


class MaskData(TrainingData):
    """Images with a label for each pixel: random scales, crops and flips in training, whole images in evaluation.

    Where they fit they are decoded once and kept: on a GPU, which transforms them in batches, or in the host's memory,
    from where worker processes transform them one by one.
    """

    @property
    def labels(self) -> Labels:
        """The classes, the ignored label and the colours."""
        return next(iter(self._splits.values()) if self._splits else iter([self.split("train")])).labels

    def class_names(self) -> list[str]:
        return list(self.labels.classes)

    def load(self, split: str) -> SegmentedImages:
        if not self.settings.path:
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

    def setup(self, stage: str) -> None:
        super().setup(stage)
        for split in self._datasets:
            if not _any_pixel_counts(self.split(split)):
                raise BadImage(
                    f"{self.settings.path}: every pixel of {split} has label {self.labels.ignore_index}, so that none "
                    "counts"
                )

    def build(self, split: str) -> SegmentationDataset | DecodedPairs:
        images = self.split(split)
        transform = (joint_training_transform if split == "train" else joint_evaluation_transform)(self.joint)
        dataset = SegmentationDataset(images, transform, skip_bad=self.settings.skip_bad_images)
        needed = len(images) * _bytes_of_one(images)
        if not self.keeps(needed):
            return dataset
        if self.fits_on_device(needed) and (pairs := self._pairs(dataset, split)) is not None:
            return pairs
        dataset.keep(self.track)
        return dataset

    def _pairs(self, dataset: SegmentationDataset, split: str) -> DecodedPairs | None:
        images, skipped = dataset.images, list(self.skipped)
        key = f"pairs-{fingerprint([*images.images, *images.masks], self.settings.skip_bad_images)}"
        pairs: DecodedPairs = self.decoded(key, lambda: self._decode(dataset), DecodedPairs)
        if split == "train" or pairs.same_size:
            return pairs
        # Evaluation sees images as they are, and padding would change what attention does.
        self.skipped = skipped
        return None

    @property
    def joint(self) -> JointSettings:
        return replace(self.settings.images, ignore_index=self.labels.ignore_index)

    def _decode(self, dataset: SegmentationDataset) -> Decoded:
        return stack_pairs(good_samples(list(dataset.read_all(self.track)))), dataset.bad_names()

    def collate(self) -> Callable[[list[Any]], Any]:
        return partial(collate_padded, ignore_index=self.labels.ignore_index)

    def prepare(self, batch: tuple[Tensor, ...], split: str) -> tuple[Tensor, Tensor]:
        dataset = self._datasets[split]
        if self.gathers_on_device(dataset):
            images, masks, sizes = dataset.gather(*batch)
            if split == "train":
                images, masks = random_scaled_crop(images, masks, sizes, self.joint)
            else:
                images = normalise(images, self.joint)
        else:
            images, masks = batch
        return images.contiguous(memory_format=self.memory_format), masks.to(torch.int64)


def _bytes_of_one(images: SegmentedImages) -> int:
    """What the first pair takes when decoded: the others of a dataset are about as large."""
    try:
        return 4 * images.pair(0)[1].size
    except BadImage:
        return 0  # whoever decodes it next says what is wrong with it


def _any_pixel_counts(images: SegmentedImages) -> bool:
    """Whether there is anything to learn from, or to compare with; as a rule the first image shows it."""
    return any(_counts(images, index) for index in range(len(images)))


def _counts(images: SegmentedImages, index: int) -> bool:
    try:
        return bool((images.pair(index)[1] != images.labels.ignore_index).any())
    except BadImage:
        return True  # whoever decodes it next says what is wrong with it


def _some(classes: Any) -> str:
    return ", ".join(list(classes)[:4]) + (", ..." if len(classes) > 4 else "")
