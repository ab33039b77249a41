"""Volumes with labels for Lightning: from their files to crops in training, and to whole volumes in evaluation."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch import Tensor

from kronattn.data.cache import fingerprint
from kronattn.data.images import BadImage
from kronattn.data.volume_augment import random_volume_crop, vary_intensity
from kronattn.data.volumes import (
    IGNORED,
    DecodedVolumes,
    Volumes,
    check_same_spacing,
    decode_volumes,
    load_volumes,
)
from kronattn.training.data import TrainingData
from kronattn.training.sampling import IndexBatches

__all__ = ["VolumeBatches"]

DATASETS = ("nifti",)


class VolumeBatches(TrainingData):
    """Random crops of volumes in training; in evaluation one volume at a time, as it is: padding would change what a
    context layer sees."""

    _found: list[str] | None = None

    def class_names(self) -> list[str]:
        if self.classes is not None:
            # Of a trained network: what is evaluated need not come with what it was trained on.
            return list(self.classes)
        named = self.split("train").classes
        if named is not None:
            return list(named)
        if self._found is None:
            # Asked for before Lightning says which device it is: what is read for that is not what is trained on.
            dataset = self.build("train")
            labels = self._labels(dataset, "train")
            if labels != list(range(len(labels))):
                self._refuse_gap(dataset, labels)
            self._found = [f"class {number}" for number in labels]
        return self._found

    def _labels(self, dataset: DecodedVolumes, split: str) -> list[int]:
        """Those that count, in their order."""
        labels = [label for label in dataset.labels.unique().tolist() if label != IGNORED]
        if not labels:
            raise BadImage(f"{self.settings.path}: every voxel of {split} has label {IGNORED}, so that none counts")
        return labels

    def _refuse_gap(self, dataset: DecodedVolumes, labels: list[int]) -> None:
        """A label that was not meant would add a class, and all those up to it, without a word."""
        absent = next(number for number in range(len(labels)) if labels[number] != number)
        index = next(at for at in range(len(dataset)) if (dataset.labels[at] == labels[absent]).any())
        raise BadImage(
            f"{self.split('train').labels[index]} has label {labels[absent]}, but no volume of train has {absent}: "
            "labels are 0, 1, 2, ... without a gap; where one is meant, name all classes in classes.txt"
        )

    def load(self, split: str) -> Volumes:
        return load_volumes(self.place("volumes", DATASETS), split)

    def setup(self, stage: str) -> None:
        if stage == "fit":
            check_same_spacing([self.split(name) for name in {"train": 0, self.evaluated: 0, **self._splits}])
        super().setup(stage)
        classes = len(self.class_names())
        for split, dataset in self._datasets.items():
            most = self._labels(dataset, split)[-1]
            if most >= classes:
                raise BadImage(
                    f"{self.settings.path}: {split} has label {most}, but train has 0 to {classes - 1} alone"
                )

    def build(self, split: str) -> DecodedVolumes:
        volumes = self.split(split)
        key = f"volumes-{fingerprint([*volumes.images, *volumes.labels], volumes.classes)}"
        return self.decoded(key, lambda: (decode_volumes(volumes, track=self.track), []), DecodedVolumes)

    def val_dataloader(self) -> Any:
        dataset = self._datasets[self.evaluated]
        order = UnrepeatedDistributedSampler(dataset, self._processes(), self._rank(), shuffle=False)
        # Numbers alone, on the host: prepare has to know each volume's own size.
        return IndexBatches(order, 1, torch.device("cpu"), drop_last=False)

    test_dataloader = val_dataloader

    def prepare(self, batch: tuple[Tensor, ...], split: str) -> tuple[Tensor, Tensor]:
        dataset, settings = self._datasets[split], self.images
        if split != "train":
            return self._whole(dataset, int(batch[0]))
        voxels, labels, sizes = dataset.gather(*batch) if self.gathers_on_device(dataset) else batch
        # Before the crop: what a smaller volume is padded with stays zero.
        voxels, labels = random_volume_crop(
            vary_intensity(voxels.float(), settings.intensity), labels, sizes, settings.crop
        )
        return self._laid_out(voxels), labels

    def _whole(self, dataset: DecodedVolumes, index: int) -> tuple[Tensor, Tensor]:
        depth, height, width = dataset.own_sizes[index]
        voxels = dataset.voxels[index : index + 1, :, :depth, :height, :width]
        labels = dataset.labels[index : index + 1, :depth, :height, :width]
        device = self.device()
        return self._laid_out(voxels.to(device).float()), labels.to(device).long()

    def _laid_out(self, voxels: Tensor) -> Tensor:
        last = self.memory_format is torch.channels_last
        return voxels.contiguous(memory_format=torch.channels_last_3d if last else torch.contiguous_format)
