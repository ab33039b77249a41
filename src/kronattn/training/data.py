"""What the data modules of all tasks share: splits, loaders, and draws that a resumed run repeats."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch.utils.data import DataLoader, Dataset

from kronattn.training.recipe import DataSettings
from kronattn.training.sampling import EpochSampler, WithDraws, mixed, seed_draws

__all__ = ["IN_MEMORY_AT_MOST", "Track", "TrainingData"]

# What "auto" keeps in memory, in bytes: several copies of Imagenette, but not ImageNet.
IN_MEMORY_AT_MOST = 8 << 30

Track = Callable[[Sequence[int], str], Iterable[int]]


class TrainingData(L.LightningDataModule):
    """A dataset's splits, as batches that the network can take.

    The order of a training epoch and the draws for a sample follow from ``seed``, the epoch and the sample alone; all
    other draws of a step (augmentation on the device, dropout) from ``seed`` and the step: a resumed run sees what the
    whole run would have seen, whatever the number of worker processes.

    Args:
        settings: the recipe's.
        batch_size: for each process.
        seed: the recipe's.
        channels_last: the memory format of batches.
        classes: the classes of a trained network, to count labels in.
        track: wraps the decoding, in a progress bar for instance.
        split: what is validated and examined.
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
        split: str = "val",
    ) -> None:
        super().__init__()
        self.settings: Any = settings
        self.batch_size = batch_size
        self.seed = seed
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.classes = classes
        self.track = track
        self.evaluated = split
        self.skipped: list[str] = []
        self._splits: dict[str, Any] = {}
        self._datasets: dict[str, Any] = {}

    @abstractmethod
    def class_names(self) -> list[str]:
        """The classes, in the order of their labels."""

    @abstractmethod
    def load(self, split: str) -> Any:
        """Read one split's list of samples, and refuse what does not fit."""

    @abstractmethod
    def build(self, split: str) -> Dataset:
        """One split as a PyTorch dataset."""

    def split(self, name: str) -> Any:
        """One split's list of samples, read once."""
        if name not in self._splits:
            self._splits[name] = self.load(name)
        return self._splits[name]

    def setup(self, stage: str) -> None:
        names = ("train", self.evaluated) if stage == "fit" else (self.evaluated,)
        samples = [self.split(name) for name in names]
        whole = self.batch_size * self._processes()
        if stage == "fit" and len(samples[0]) < whole:
            raise ValueError(f"{len(samples[0])} training images do not fill one batch of {whole}")
        for name in names:
            if name not in self._datasets:
                self._datasets[name] = self.build(name)

    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch of one process; what is left over is another rest in each epoch."""
        return len(self._datasets["train"]) // (self.batch_size * self._processes())

    def train_dataloader(self) -> DataLoader:
        dataset = self._datasets["train"]
        gathers = hasattr(dataset, "__getitems__")
        sampler = EpochSampler(
            dataset, self._processes(), self._rank(), seed=self.seed, epoch=self._epoch, with_draws=not gathers
        )
        return self._loader(dataset if gathers else WithDraws(dataset), sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        dataset = self._datasets[self.evaluated]
        sampler = UnrepeatedDistributedSampler(dataset, self._processes(), self._rank(), shuffle=False)
        return self._loader(dataset, sampler, drop_last=False)

    test_dataloader = val_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        if self.trainer.training:
            seed_draws(mixed(self.seed, self.trainer.global_step, self._rank()), self.device())
        return batch

    def bad_images(self) -> list[str]:
        """The names of images that were left out so far."""
        found = list(self.skipped)
        for dataset in self._datasets.values():
            if hasattr(dataset, "skipped"):
                found += [dataset.images.name(index) for index in dataset.skipped.nonzero().flatten().tolist()]
        return found

    def keeps(self, bytes_needed: int) -> bool:
        """Whether decoded images of so many bytes stay in memory."""
        choice = self.settings.in_memory
        return choice == "yes" or (choice == "auto" and bytes_needed <= IN_MEMORY_AT_MOST)

    def device(self) -> torch.device:
        """The device of this process's network."""
        return self.trainer.strategy.root_device if self.trainer else torch.device("cpu")

    def _loader(self, dataset: Any, sampler: Any, **options: Any) -> DataLoader:
        on_gpu = self.device().type == "cuda"
        if hasattr(dataset, "__getitems__"):
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
            persistent_workers=workers > 0,
            collate_fn=self.collate,
            pin_memory=on_gpu,
            **options,
        )

    def collate(self, samples: list[Any]) -> Any:
        """Samples to a batch."""
        raise NotImplementedError

    def _epoch(self) -> int:
        # By steps, since Lightning's own counts of epochs are not all right when a resumed run asks for its batches.
        assert self.trainer is not None
        return self.trainer.global_step // self.steps_per_epoch()

    def _processes(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0


def _as_it_is(batch: Any) -> Any:
    return batch
