"""Labelled images for Lightning: from their files to augmented, normalised batches on the device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from kronattn.data import augment
from kronattn.data.classification import LabelledImages, check_same_classes, load_split, with_classes
from kronattn.data.datasets import DecodedImages, ImageDataset, collate_good, decode_all
from kronattn.data.transforms import ImageSettings, evaluation_transform, training_transform
from kronattn.training.recipe import DataSettings

__all__ = ["ImageData"]

# What "auto" keeps in memory, in bytes: several copies of Imagenette, but not ImageNet.
IN_MEMORY_AT_MOST = 8 << 30

Track = Callable[[Sequence[int], str], Iterable[int]]


class ImageData(L.LightningDataModule):
    """A dataset's two splits, as batches that the network can take.

    Where the images fit, they are decoded once, kept (on the GPU where there is one), and cropped in batches there.
    Elsewhere worker processes decode and crop them one by one. What follows (colours, normalisation, erasing, mixing)
    is done on the device either way.

    The order of a training epoch and the draws of its worker processes follow from ``seed`` and the epoch's number
    alone, and all other draws of a step (augmentation on the device, dropout) from ``seed`` and the step's: a resumed
    run sees what the whole run would have seen.

    Args:
        settings: the recipe's.
        batch_size: for each process.
        seed: the recipe's.
        channels_last: the memory format of batches.
        classes: the classes of a trained network, to count labels in.
        track: wraps the decoding, in a progress bar for instance.
    """

    def __init__(
        self,
        settings: DataSettings,
        batch_size: int,
        *,
        seed: int = 0,
        channels_last: bool = False,
        classes: Sequence[str] | None = None,
        track: Track = lambda items, description: items,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.batch_size = batch_size
        self.seed = seed
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.classes = classes
        self.track = track
        self.skipped: list[str] = []
        self._splits: dict[str, LabelledImages] = {}
        self._datasets: dict[str, DecodedImages | ImageDataset] = {}
        self._mix: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    @property
    def images(self) -> ImageSettings:
        return self.settings.images

    def split(self, name: str) -> LabelledImages:
        """The labelled images of "train" or "val"."""
        if name not in self._splits:
            found = load_split(self.settings.name, self.settings.path, name)
            self._splits[name] = with_classes(found, self.classes) if self.classes else found
        return self._splits[name]

    def setup(self, stage: str) -> None:
        names = ("train", "val") if stage == "fit" else ("val",)
        if stage == "fit":
            check_same_classes(self.split("train"), self.split("val"))
            if len(self.split("train").labels) < self.batch_size * self._processes():
                count = len(self.split("train").labels)
                raise ValueError(
                    f"{count} training images do not fill one batch of {self.batch_size * self._processes()}"
                )
        for name in names:
            if name not in self._datasets:
                self._datasets[name] = self._build(name)
        if stage == "fit":
            self._mix = _mixing(self.images, len(self.split("train").classes))

    def train_dataloader(self) -> DataLoader:
        # Built anew for every epoch; see the class's docstring. What a resumed run has behind it is told by
        # "processed": Lightning asks for the loader before it sets current_epoch right.
        assert self.trainer is not None
        epoch = self.trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        dataset = self._datasets["train"]
        sampler: DistributedSampler = DistributedSampler(
            dataset, self._processes(), self._rank(), shuffle=True, seed=self.seed, drop_last=True
        )
        sampler.set_epoch(epoch)
        draws = partial(_seed_worker, _mixed(self.seed, epoch, self._rank()))
        return self._loader(dataset, sampler, drop_last=True, worker_init_fn=draws)

    def val_dataloader(self) -> DataLoader:
        dataset = self._datasets["val"]
        sampler = UnrepeatedDistributedSampler(dataset, self._processes(), self._rank(), shuffle=False)
        return self._loader(dataset, sampler, drop_last=False)

    test_dataloader = val_dataloader

    def on_before_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        assert self.trainer is not None
        if self.trainer.training:
            torch.manual_seed(_mixed(self.seed, self.trainer.global_step, self._rank()))
        return batch

    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        images, labels = batch
        assert self.trainer is not None
        training = self.trainer.training
        kept = isinstance(self._datasets["train" if training else "val"], DecodedImages)
        with torch.no_grad():
            if training:
                images, labels = self._augmented(images, labels, kept)
            else:
                if kept:
                    images = augment.center_crop(images, self.images.evaluated_resize, self.images.evaluated_size)
                images = augment.normalise(images, self.images)
        return images.contiguous(memory_format=self.memory_format), labels

    def bad_images(self) -> list[str]:
        """The names of images that were left out so far."""
        found = list(self.skipped)
        for dataset in self._datasets.values():
            if isinstance(dataset, ImageDataset):
                found += [dataset.images.name(index) for index in dataset.skipped.nonzero().flatten().tolist()]
        return found

    def _augmented(self, images: Tensor, labels: Tensor, kept: bool) -> tuple[Tensor, Tensor]:
        settings = self.images
        if kept and settings.crop == "random":
            images = augment.flip(augment.random_crop(images, settings.size), settings.flip)
        elif kept:
            images = augment.flip(augment.random_resized_crop(images, settings.size, settings.scale), settings.flip)
        images = augment.normalise(augment.jitter(images, settings.jitter), settings)
        images = augment.random_erase(images, settings.erase)
        return self._mix(images, labels) if self._mix else (images, labels)

    def _build(self, name: str) -> DecodedImages | ImageDataset:
        images = self.split(name)
        size = self.images.resize if name == "train" else self.images.evaluated_resize
        needed = len(images.labels) * 3 * size * size
        if self.settings.in_memory == "yes" or (self.settings.in_memory == "auto" and needed <= IN_MEMORY_AT_MOST):
            decoded, bad = decode_all(images, size, skip_bad=self.settings.skip_bad_images, track=self.track)
            self.skipped += bad
            return self._on_device(decoded, needed)
        transform = (training_transform if name == "train" else evaluation_transform)(self.images)
        return ImageDataset(images, transform, skip_bad=self.settings.skip_bad_images)

    def _on_device(self, decoded: DecodedImages, needed: int) -> DecodedImages:
        device = self.trainer.strategy.root_device if self.trainer else torch.device("cpu")
        if device.type == "cuda" and needed < torch.cuda.mem_get_info(device)[0] / 4:
            return DecodedImages(decoded.pixels.to(device), decoded.labels.to(device))
        return decoded

    def _loader(self, dataset: Any, sampler: Any, **options: Any) -> DataLoader:
        on_gpu = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        if isinstance(dataset, DecodedImages):
            pinned = on_gpu and not dataset.pixels.is_cuda
            return DataLoader(
                dataset, self.batch_size, sampler=sampler, collate_fn=_as_it_is, pin_memory=pinned, **options
            )
        workers = min(self.settings.workers, os.cpu_count() or 1)
        return DataLoader(
            dataset,
            self.batch_size,
            sampler=sampler,
            num_workers=workers,
            collate_fn=collate_good,
            pin_memory=on_gpu,
            **options,
        )

    def _processes(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0


def _mixed(*numbers: int) -> int:
    """One seed from several numbers, different for all that occur."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number) % (1 << 63)
    return mixed


def _seed_worker(seed: int, worker: int) -> None:
    torch.manual_seed(_mixed(seed, worker))


def _as_it_is(batch: Any) -> Any:
    return batch


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
