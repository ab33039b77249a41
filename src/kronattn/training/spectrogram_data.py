"""Spectrograms in folds for Lightning: from their pictures to augmented, normalised batches on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kronattn.data import augment
from kronattn.data.cache import fingerprint
from kronattn.data.datasets import DecodedImages
from kronattn.data.spectrogram_augment import mask_bands, shift_in_time
from kronattn.data.spectrograms import Spectrograms, decode_spectrograms, load_spectrograms
from kronattn.training.data import TrainingData

__all__ = ["SpectrogramPictures"]

DATASETS = ("spectrograms",)


class SpectrogramPictures(TrainingData):
    """Spectrograms with a class each: moved in time, bands of them blanked, mixed; all on the device."""

    def load(self, split: str) -> Spectrograms:
        return load_spectrograms(self.place("spectrograms", DATASETS), self.images.fold, split)

    def build(self, split: str) -> DecodedImages:
        pictures = self.split(split)
        key = f"spectrograms-{fingerprint(pictures.entries, self.images.size)}"
        size = self.images.size
        return self.decoded(key, lambda: (decode_spectrograms(pictures, size, track=self.track), []), DecodedImages)

    def prepare(self, batch: tuple[Tensor, ...], split: str) -> tuple[Tensor, Tensor]:
        dataset, settings = self._datasets[split], self.images
        images, labels = dataset.gather(*batch) if self.gathers_on_device(dataset) else batch
        if split == "train":
            images = augment.normalise(shift_in_time(images, settings.shift), settings)
            images = mask_bands(images, settings.bands, settings.band)
            if settings.mixup:
                images, labels = augment.mix(images, labels, len(self.class_names()), mixup=settings.mixup)
        else:
            images = augment.normalise(images, settings)
        return images.to(memory_format=self.memory_format, dtype=torch.float32), labels
