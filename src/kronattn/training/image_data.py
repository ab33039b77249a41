"""Labelled images for Lightning: from their files to augmented, normalised batches on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kronattn.data import augment
from kronattn.data.classification import ImageFiles, LabelledImages, check_same_classes, load_split, with_classes
from kronattn.data.datasets import DecodedImages, ImageDataset, collate_good, decode_all
from kronattn.data.transforms import ImageSettings, evaluation_transform, training_transform
from kronattn.training.data import TrainingData

__all__ = ["ImageData"]


class ImageData(TrainingData):
    """Images with a class each.

    Where the images fit, they are decoded once, kept (on the GPU where there is one), and cropped in batches there.
    Elsewhere worker processes decode and crop them one by one. What follows (colours, normalisation, erasing, mixing)
    is done on the device either way.
    """

    _mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def images(self) -> ImageSettings:
        return self.settings.images

    def class_names(self) -> list[str]:
        return list(self.split("train").classes)

    def load(self, split: str) -> LabelledImages:
        found = load_split(self.settings.name, self.settings.path, split)
        if self.images.keep_aspect and isinstance(found, ImageFiles):
            found = replace(found, square=True)
        return with_classes(found, self.classes) if self.classes else found

    def setup(self, stage: str) -> None:
        if stage == "fit":
            check_same_classes(self.split("train"), self.split(self.evaluated))
            self._mix = _mixing(self.images, len(self.class_names()))
        super().setup(stage)

    def build(self, split: str) -> DecodedImages | ImageDataset:
        images, training = self.split(split), split == "train"
        size = self.images.resize if training else self.images.evaluated_resize
        needed = len(images) * 3 * size * size
        if self.keeps(needed):
            decoded, bad = decode_all(images, size, skip_bad=self.settings.skip_bad_images, track=self.track)
            self.skipped += bad
            return self._on_device(decoded, needed)
        transform = (training_transform if training else evaluation_transform)(self.images)
        return ImageDataset(images, transform, skip_bad=self.settings.skip_bad_images)

    def collate(self, samples: list[Any]) -> Any:
        return collate_good(samples)

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        images, labels = batch
        assert self.trainer is not None
        training = self.trainer.training
        kept = isinstance(self._datasets["train" if training else self.evaluated], DecodedImages)
        with torch.no_grad():
            if training:
                images, labels = self._augmented(images, labels, kept)
            else:
                if kept:
                    images = augment.center_crop(images, self.images.evaluated_resize, self.images.evaluated_size)
                images = augment.normalise(images, self.images)
        return images.contiguous(memory_format=self.memory_format), labels

    def _augmented(self, images: Tensor, labels: Tensor, kept: bool) -> tuple[Tensor, Tensor]:
        settings = self.images
        if kept and settings.crop == "random":
            images = augment.flip(augment.random_crop(images, settings.size), settings.flip)
        elif kept:
            images = augment.flip(augment.random_resized_crop(images, settings.size, settings.scale), settings.flip)
        images = augment.normalise(augment.jitter(images, settings.jitter), settings)
        images = augment.random_erase(images, settings.erase)
        return self._mix(images, labels) if self._mix else (images, labels)

    def _on_device(self, decoded: DecodedImages, needed: int) -> DecodedImages:
        device = self.device()
        if device.type == "cuda" and needed < torch.cuda.mem_get_info(device)[0] / 4:
            return DecodedImages(decoded.pixels.to(device), decoded.labels.to(device))
        return decoded


def _mixing(settings: ImageSettings, classes: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    from torchvision.transforms import v2

    ways: list[Any] = []
    if settings.mixup:
        ways.append(v2.MixUp(alpha=settings.mixup, num_classes=classes))
    if settings.cutmix:
        ways.append(v2.CutMix(alpha=settings.cutmix, num_classes=classes))
    if not ways:
        return None
    return ways[0] if len(ways) == 1 else v2.RandomChoice(ways)
