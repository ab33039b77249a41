"""Dice: how much a predicted region and the true one overlap, twice their intersection over the sum of their sizes."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["MeanDice", "dice_loss"]


class MeanDice(Metric):
    """The mean over samples of each class's Dice, and over the classes but the first, the background.

    Where a sample neither has a class nor shows it, that class does not count in it. Samples may have sizes of their
    own; positions with the ignored label do not count. With ``by_class``, every class by itself.

    Example:
        >>> dice = MeanDice(2, ignore_index=255)
        >>> dice.update(torch.tensor([[0, 1, 1, 1]]), torch.tensor([[0, 1, 0, 255]]))
        >>> round(float(dice.compute()), 4)
        0.6667
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, classes: int, ignore_index: int, *, by_class: bool = False) -> None:
        super().__init__()
        self.by_class = by_class
        self.classes = classes
        self.ignore_index = ignore_index
        self.add_state("total", torch.zeros(classes, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(classes, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, truth: Tensor) -> None:
        """(N, *grid) labels both."""
        counts = truth != self.ignore_index
        label = torch.arange(self.classes, device=truth.device).view(-1, *[1] * truth.dim())
        shown, true = (((labels == label) & counts).flatten(2) for labels in (predicted, truth))
        sizes = (shown.sum(2) + true.sum(2)).double()
        overlap = 2 * (shown & true).sum(2).double()
        there = sizes > 0
        self.total += (torch.where(there, overlap / sizes.clamp(min=1), 0)).sum(1)
        self.count += there.sum(1)

    def compute(self) -> Tensor:
        """A scalar; or (classes,) with ``by_class``, NaN for those that are nowhere."""
        every = (self.total / self.count).float()
        return every if self.by_class else every[1:].nanmean()


def dice_loss(logits: Tensor, truth: Tensor, ignore_index: int) -> Tensor:
    """One minus the soft Dice of (N, classes, *grid) logits over the whole batch, mean over the classes but the first.

    Example:
        >>> truth = torch.tensor([[0, 1]])
        >>> sure = 50 * torch.eye(2)[None]
        >>> round(float(dice_loss(sure, truth, 255)), 3), round(float(dice_loss(-sure, truth, 255)), 3)
        (0.0, 1.0)
    """
    classes = logits.shape[1]
    counts = (truth != ignore_index)[:, None]
    shares = logits.float().softmax(1) * counts
    # Not one_hot, which may ask the device for the largest label.
    number = torch.arange(classes, device=truth.device).view(1, -1, *[1] * (truth.dim() - 1))
    true = (truth[:, None] == number) & counts
    over = (0, *range(2, logits.dim()))
    overlap, sizes = (shares * true).sum(over), shares.sum(over) + true.sum(over)
    return 1 - (2 * overlap / sizes.clamp(min=1e-6))[1:].mean()
