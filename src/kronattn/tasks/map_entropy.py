"""Cross-entropy of a class for each position of a map, with the same bits every time where that is asked for."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["map_entropy"]


def map_entropy(scores: Tensor, labels: Tensor, *, ignore_index: int, label_smoothing: float = 0.0) -> Tensor:
    """The mean over positions whose label is not ignored.

    Args:
        scores: (N, classes, ...).
        labels: (N, ...).
        ignore_index: the label of positions that do not count.
        label_smoothing: of PyTorch's cross-entropy.

    Example:
        >>> scores = torch.tensor([[[[2.0, 0.0]], [[0.0, 5.0]]]])
        >>> round(float(map_entropy(scores, torch.tensor([[[0, 255]]]), ignore_index=255)), 4)
        0.1269
    """
    if torch.are_deterministic_algorithms_enabled():
        # On a GPU PyTorch adds up losses of maps in any order, but not those of a list of positions.
        scores, labels = scores.movedim(1, -1).flatten(0, -2), labels.flatten()
    return F.cross_entropy(scores, labels, ignore_index=ignore_index, label_smoothing=label_smoothing)
