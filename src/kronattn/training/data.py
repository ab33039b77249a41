"""What the data modules of all tasks share: splits, loaders, and draws that a resumed run repeats."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import lightning as L
import torch
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kronattn.data.cache import Decoded, cached
from kronattn.data.decoded import ReadSamples, Track, untracked
from kronattn.names import near_names
from kronattn.tasks import Task
from kronattn.training.recipe import DataSettings
from kronattn.training.sampling import EpochSampler, IndexBatches, WithDraws, mixed, seed_draws

log = logging.getLogger(__name__)

__all__ = ["IN_MEMORY_AT_MOST", "TrainingData", "load_data_module"]

# What "auto" keeps in memory, in bytes: several copies of Imagenette, but not ImageNet.
IN_MEMORY_AT_MOST = 8 << 30

# Pixels that a GPU validates at a time, where the images lie there: enough to keep it busy.
VALIDATED_AT_ONCE = 1 << 24


class TrainingData(L.LightningDataModule):
    """A dataset's splits, as batches that the network can take.

    The order of a training epoch and the draws for a sample follow from ``seed``, the epoch and the sample alone; all
    other draws of a step (augmentation on the device, dropout) from ``seed`` and the step: a resumed run sees what the
    whole run would have seen, whatever the number of worker processes.

    Where the decoded images lie on the device, loaders hand out their numbers alone, and :meth:`prepare` gathers them.
    With ``prepared_in_step`` it is the training step that calls it, not Lightning.

    Args:
        settings: the recipe's.
        batch_size: for each process.
        seed: the recipe's.
        channels_last: the memory format of batches.
        classes: the classes of a trained network, to count labels in.
        track: wraps the decoding, in a progress bar for instance.
        split: what is validated and examined.
        cache: a folder for decoded images.
        store: decoded datasets that runs in one process share.
    """

    def __init__(
        self,
        settings: DataSettings,
        batch_size: int,
        *,
        seed: int = 0,
        channels_last: bool = False,
        classes: Sequence[str] | None = None,
        track: Track = untracked,
        split: str = "val",
        cache: Path | None = None,
        store: MutableMapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.settings: Any = settings
        self.batch_size = batch_size
        self.seed = seed
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.classes = classes
        self.track = track
        self.evaluated = split
        self.cache = cache
        self.store: MutableMapping[str, Any] = {} if store is None else store
        self.prepared_in_step = False
        self.skipped: list[str] = []
        self._splits: dict[str, Any] = {}
        self._datasets: dict[str, Any] = {}

    @property
    def images(self) -> Any:
        """How samples are prepared."""
        return self.settings.images

    def class_names(self) -> list[str]:
        """The classes, in the order of their labels."""
        return list(self.split("train").classes)

    @abstractmethod
    def load(self, split: str) -> Any:
        """Read one split's list of samples, and refuse what does not fit."""

    @abstractmethod
    def build(self, split: str) -> Dataset:
        """One split as a PyTorch dataset."""

    @abstractmethod
    def prepare(self, batch: tuple[Tensor, ...], split: str) -> tuple[Tensor, Tensor]:
        """A batch as the loader gives it, on the device, to images and targets as the network wants them."""

    def prepare_training(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        return self.prepare(batch, "train")

    def split(self, name: str) -> Any:
        """One split's list of samples, read once."""
        if name not in self._splits:
            self._splits[name] = self.load(name)
        return self._splits[name]

    def place(self, what: str, kinds: Sequence[str]) -> str:
        """Where the data lies, if it is of a known kind."""
        if self.settings.name not in kinds:
            raise ValueError(f"unknown dataset {self.settings.name!r}: {near_names(self.settings.name, kinds)}")
        if not self.settings.path:
            raise ValueError(f"{what} need to know where they lie: give --data PATH")
        return self.settings.path

    def setup(self, stage: str) -> None:
        names = ("train", self.evaluated) if stage == "fit" else (self.evaluated,)
        samples = [self.split(name) for name in names]
        whole = self.batch_size * self._processes()
        if stage == "fit" and len(samples[0]) < whole:
            raise ValueError(
                f"{len(samples[0])} training images do not fill one batch of {whole}: set a smaller batch_size"
            )
        for name in names:
            if name not in self._datasets:
                self._datasets[name] = self.build(name)

    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch of one process; what is left over is another rest in each epoch."""
        return len(self._datasets["train"]) // (self.batch_size * self._processes())

    def train_dataloader(self) -> DataLoader | IndexBatches:
        dataset = self._datasets["train"]
        gathers = hasattr(dataset, "gather")
        sampler = EpochSampler(
            dataset, self._processes(), self._rank(), seed=self.seed, epoch=self._epoch, with_draws=not gathers
        )
        if self.gathers_on_device(dataset):
            return IndexBatches(sampler, self.batch_size, dataset.device, drop_last=True)
        return self._loader(dataset if gathers else WithDraws(dataset), sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader | IndexBatches:
        dataset = self._datasets[self.evaluated]
        sampler = UnrepeatedDistributedSampler(dataset, self._processes(), self._rank(), shuffle=False)
        if self.gathers_on_device(dataset):
            at_once = VALIDATED_AT_ONCE // (dataset.pixels.shape[-2] * dataset.pixels.shape[-1])
            return IndexBatches(sampler, max(self.batch_size, at_once), dataset.device, drop_last=False)
        return self._loader(dataset, sampler, drop_last=False)

    test_dataloader = val_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        if self.trainer.training:
            seed_draws(mixed(self.seed, self.trainer.global_step, self._rank()), self.device())
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        if self.trainer.training and self.prepared_in_step:
            return batch
        with torch.no_grad():
            return self.prepare(batch, "train" if self.trainer.training else self.evaluated)

    def bad_images(self) -> list[str]:
        """The names of images that were left out so far."""
        found = list(self.skipped)
        for dataset in self._datasets.values():
            if isinstance(dataset, ReadSamples):
                found += dataset.bad_names()
        return found

    def keeps(self, bytes_needed: int) -> bool:
        """Whether decoded images of so many bytes stay in memory."""
        choice = self.settings.in_memory
        return choice == "yes" or (choice == "auto" and bytes_needed <= IN_MEMORY_AT_MOST)

    def decoded(self, key: str, make: Callable[[], Decoded], kind: Callable[..., Any]) -> Any:
        """A dataset of decoded samples, ``kind(**tensors)``: of an earlier run in this process, from the cache, or made
        now; on the GPU where there is one and it fits."""
        name = f"{key}, {self.device()}"
        if name not in self.store:
            tensors, bad = cached(self.cache, key, make)
            made = kind(**tensors)
            fits = self.fits_on_device(sum(x.nbytes for x in tensors.values()))
            self.store[name] = made.to(self.device()) if fits else made, bad
        dataset, bad = self.store[name]
        self.skipped += bad
        return dataset

    def fits_on_device(self, needed: int) -> bool:
        """Whether there is a GPU with room for so many bytes of decoded images, and for training beside them."""
        device = self.device()
        if device.type != "cuda":
            return False
        free = torch.cuda.mem_get_info(device)[0]
        if needed < free / 4:
            return True
        log.warning(
            "decoded images take %.1f GB, more than a quarter of the %.1f GB that are free on the GPU: they come from "
            "the host's memory",
            needed / 1e9,
            free / 1e9,
        )
        return False

    def gathers_on_device(self, dataset: Any) -> bool:
        """Whether loaders give this dataset's numbers alone."""
        return hasattr(dataset, "gather") and dataset.device.type != "cpu"

    def device(self) -> torch.device:
        """The device of this process's network."""
        return self.trainer.strategy.root_device if self.trainer else torch.device("cpu")

    def _loader(self, dataset: Any, sampler: Any, **options: Any) -> DataLoader:
        # Kept samples are gathered a batch at a time, in this process.
        gathers = hasattr(dataset, "__getitems__")
        workers = 0 if gathers else min(self.settings.workers, os.cpu_count() or 1)
        return DataLoader(
            dataset,
            self.batch_size,
            sampler=sampler,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=_as_it_is if gathers else self.collate(),
            pin_memory=self.device().type == "cuda",
            **options,
        )

    def collate(self) -> Callable[[list[Any]], Any]:
        """What makes a batch of samples: a function that processes can be sent, which this module is not."""
        raise NotImplementedError

    def _epoch(self) -> int:
        # By steps, since Lightning's own counts of epochs are not all right when a resumed run asks for its batches.
        assert self.trainer is not None
        return self.trainer.global_step // self.steps_per_epoch()

    def _processes(self) -> int:
        return self.trainer.world_size if self.trainer else 1

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer else 0


def load_data_module(task: Task) -> type[TrainingData]:
    """The data module that a task names.

    >>> from kronattn.tasks import find_task
    >>> load_data_module(find_task("segmentation")).__name__
    'MaskData'
    """
    return resolve_name(task.data_module)


def _as_it_is(batch: Any) -> Any:
    return batch
