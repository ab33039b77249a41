"""Labelled images for Lightning: from their files to augmented, normalised batches on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from kronattn.data import augment
from kronattn.data.cache import fingerprint
from kronattn.data.classification import ImageFiles, LabelledImages, check_same_classes, load_split, with_classes
from kronattn.data.datasets import DecodedImages, ImageDataset, collate_good, decode_all
from kronattn.training.data import TrainingData

__all__ = ["ImageData"]


class ImageData(TrainingData):
    """Images with a class each.

    Where the images fit, they are decoded once and kept, on the GPU where there is one. Otherwise worker processes
    decode them one by one. Everything that follows is done in batches on the device, and is the same either way.
    """

    def load(self, split: str) -> LabelledImages:
        found = load_split(self.settings.name, self.settings.path, split)
        if self.images.keep_aspect and isinstance(found, ImageFiles):
            found = replace(found, square=True)
        return with_classes(found, self.classes) if self.classes else found

    def setup(self, stage: str) -> None:
        if stage == "fit":
            check_same_classes(self.split("train"), self.split(self.evaluated))
        super().setup(stage)

    def build(self, split: str) -> DecodedImages | ImageDataset:
        images = self.split(split)
        size = self.images.resize if split == "train" else self.images.evaluated_resize
        skip_bad = self.settings.skip_bad_images
        if not self.keeps(len(images) * 3 * size * size):
            return ImageDataset(images, size, skip_bad=skip_bad)
        key = f"images-{_name(images, size, skip_bad)}"
        return self.decoded(key, lambda: decode_all(images, size, skip_bad=skip_bad, track=self.track), DecodedImages)

    def collate(self) -> Callable[[list[Any]], Any]:
        return collate_good

    def prepare(self, batch: tuple[Tensor, ...], split: str) -> tuple[Tensor, Tensor]:
        dataset = self._datasets[split]
        images, labels = dataset.gather(*batch) if self.gathers_on_device(dataset) else batch
        if split == "train":
            images, labels = self._augmented(images, labels)
        else:
            images = augment.center_crop(images, self.images.evaluated_resize, self.images.evaluated_size)
            images = augment.normalise(images, self.images)
        return images.contiguous(memory_format=self.memory_format), labels

    def _augmented(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        settings = self.images
        if settings.crop == "random":
            images = augment.random_crop(images, settings.size)
        else:
            images = augment.random_resized_crop(images, settings.size, settings.scale)
        images = augment.jitter(augment.flip(images, settings.flip), settings.jitter)
        images = augment.normalise(images, settings)
        images = augment.random_erase(images, settings.erase)
        if settings.mixup or settings.cutmix:
            classes = len(self.class_names())
            return augment.mix(images, labels, classes, mixup=settings.mixup, cutmix=settings.cutmix)
        return images, labels


def _name(images: LabelledImages, size: int, skip_bad: bool) -> str:
    """What decoded images are called in a cache. Those that came as pixels have no files to be known by."""
    entries = images.entries if isinstance(images, ImageFiles) else []
    square = images.square if isinstance(images, ImageFiles) else True
    return fingerprint(entries, size, skip_bad, square, images.labels, len(images))
