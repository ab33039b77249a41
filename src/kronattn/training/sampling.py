"""The order of samples and the draws for each, as functions of seed, epoch and sample alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

__all__ = ["EpochSampler", "IndexBatches", "WithDraws", "mixed", "seed_draws"]


def mixed(*numbers: int) -> int:
    """One seed from several numbers.

    >>> mixed(0, 1) == mixed(1, 0)
    False
    """
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % (1 << 63)
    return seed


def seed_draws(seed: int, device: torch.device | None = None) -> None:
    """Have the draws on the CPU, and on ``device``, follow from ``seed``.

    As torch.manual_seed does, which also leaves a note for every kind of device that has not been used yet. To write
    these takes longer than a step's other preparations, and they pile up.

    >>> seed_draws(7)
    >>> drawn = torch.rand(2)
    >>> _ = torch.manual_seed(7)
    >>> torch.equal(drawn, torch.rand(2))
    True
    """
    kind = "cpu" if device is None else device.type
    if kind not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if kind == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


class EpochSampler(DistributedSampler):
    """A shuffled epoch, shared out among processes; the order follows from the seed and the epoch.

    Args:
        dataset: anything with a length.
        processes: how many share it.
        rank: which of them this is.
        seed: the run's.
        epoch: tells the epoch when an epoch's iteration begins. Lightning's ``set_epoch`` comes too late for the
            epoch that a run is resumed with: workers have begun to fetch by then.
        with_draws: hand out ``(seed, index)`` with a seed for each sample, for :class:`WithDraws`.
    """

    def __init__(
        self, dataset: Dataset, processes: int, rank: int, *, seed: int, epoch: Callable[[], int], with_draws: bool
    ) -> None:
        super().__init__(dataset, processes, rank, shuffle=True, seed=seed, drop_last=True)
        self.epoch_now = epoch
        self.with_draws = with_draws

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch_now()
        self.set_epoch(epoch)
        if not self.with_draws:
            return super().__iter__()
        return ((mixed(self.seed, epoch, index), index) for index in super().__iter__())


class WithDraws(Dataset):
    """A dataset whose random transforms draw from a generator that is seeded for each sample.

    So a sample does not depend on which worker process makes it, or on how many there are.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, drawn: tuple[int, int]) -> Any:
        seed, index = drawn
        seed_draws(seed)
        return self.dataset[index]


class IndexBatches:
    """The numbers of samples in batches, on a device: an epoch's are brought there at once, and nothing is waited for.

    Args:
        order: gives an epoch's numbers, anew each time that it is iterated over.
        batch_size: how many make a batch.
        device: where they go.
        drop_last: leave out a batch that is not full.

    Example:
        >>> [batch.tolist() for batch, in IndexBatches(range(5), 2, torch.device("cpu"), drop_last=False)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, order: Any, batch_size: int, device: torch.device, *, drop_last: bool) -> None:
        self.order = order
        self.batch_size = batch_size
        self.device = device
        self.drop_last = drop_last

    def __len__(self) -> int:
        whole, rest = divmod(len(self.order), self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        numbers = torch.tensor(list(self.order), dtype=torch.int64, device=self.device)
        return ((batch,) for batch in numbers.split(self.batch_size)[: len(self)])
