"""Masks: which positions of a grid hold data, for batches of samples of different sizes.

A mask is (N, *grid), boolean, true where there is data. The middle stage needs each token's share: which part of
the positions that it is the average of hold data. A token whose share is zero is not there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kronattn.ops.checks import check_grid_tensor, check_mask
from kronattn.ops.fx import leaf_function
from kronattn.ops.grid import wide_averages

__all__ = ["NO_MASKS", "Masks", "apply_masks", "axis_means", "cleared", "pad_batch", "present"]


class Masks(NamedTuple):
    """The query's (N, *grid) mask, and (N, sum(grid)) shares of the query's and of the key's tokens; all or none."""

    mask: Tensor | None = None
    shares: Tensor | None = None
    key_shares: Tensor | None = None


NO_MASKS = Masks()


def pad_batch(samples: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Samples of different sizes as one batch, with zeros after the end of each axis, and its mask.

    Args:
        samples: one or more (C, *grid) tensors with the same channels and number of axes, 1 to 4.

    Returns:
        (N, C, *grid) with the largest size of each axis, and (N, *grid), true where there is data.

    Example:
        >>> batch, mask = pad_batch([torch.ones(3, 2, 5), torch.ones(3, 4, 4)])
        >>> batch.shape, mask.shape, mask.sum(dim=(1, 2))
        (torch.Size([2, 3, 4, 5]), torch.Size([2, 4, 5]), tensor([10, 16]))
    """
    samples = list(samples)
    if not samples:
        raise ValueError("samples must be one or more tensors, not none")
    for index, sample in enumerate(samples):
        check_grid_tensor(sample[None] if isinstance(sample, Tensor) else sample, f"samples[{index}] as a batch of one")
        kinds = [(x.shape[0], x.dim() - 1, x.dtype, x.device) for x in (samples[0], sample)]
        for name, first, own in zip(("channels", "axes", "dtype", "device"), *kinds, strict=True):
            if own != first:
                raise ValueError(f"samples must have the same {name}: samples[0] has {first}, samples[{index}] {own}")
    grid = [max(sizes) for sizes in zip(*(sample.shape[1:] for sample in samples), strict=True)]
    batch = samples[0].new_zeros(len(samples), samples[0].shape[0], *grid)
    mask = batch.new_zeros(len(samples), *grid, dtype=torch.bool)
    for index, sample in enumerate(samples):
        place: list[Any] = [slice(size) for size in sample.shape[1:]]
        # Not by way of views of each sample: those could not be written to with a gradient to come.
        batch[(index, ..., *place)] = sample
        mask[(index, *place)] = True
    return batch, mask


@leaf_function
def apply_masks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Masks]:
    """Query, key and value without what masks leave out, which stay one tensor where they are, and tokens' shares."""
    if mask is None and key_mask is None:
        return query, key, value, NO_MASKS
    if key is query and key_mask is not None:
        raise ValueError("key_mask was given without a key of its own: self-attention has one mask, mask")
    mask = _checked(mask, query, "mask", "query")
    key_mask = mask if key is query else _checked(key_mask, key, "key_mask", "key")
    cleared_query = cleared(query, mask)
    cleared_key = cleared_query if key is query else cleared(key, key_mask)
    cleared_value = cleared_key if value is key else cleared(value, key_mask)
    wide = torch.promote_types(query.dtype, torch.float32)
    shares, key_shares = (wide_averages(each.unsqueeze(1).to(wide)).squeeze(1) for each in (mask, key_mask))
    return cleared_query, cleared_key, cleared_value, Masks(mask, shares, key_shares)


def _checked(mask: Tensor | None, x: Tensor, name: str, owner: str) -> Tensor:
    """A mask of (N, C, *grid), which is true everywhere if none is given."""
    if mask is None:
        return torch.ones_like(x[:, 0], dtype=torch.bool)
    check_mask(mask, x, name, owner)
    return mask


@leaf_function
def cleared(x: Tensor, mask: Tensor | None) -> Tensor:
    """(N, C, *grid) with zeros where there is no data, whatever stood there."""
    return x if mask is None else x.masked_fill(~mask.unsqueeze(1), 0)


def present(shares: Tensor) -> Tensor:
    """(N, S): which tokens can be attended to. In a sample without any, all: zeros, so that nothing divides by zero."""
    there = shares > 0
    return there | ~there.any(dim=1, keepdim=True)


def axis_means(tokens: Tensor, sizes: Sequence[int], shares: Tensor | None) -> list[Tensor]:
    """The mean of each axis's part of (N, sum(sizes), C) tokens, over the positions that hold data: (N, 1, C) each."""
    parts = tokens.split(list(sizes), dim=1)
    if shares is None:
        return [part.mean(dim=1, keepdim=True) for part in parts]
    weights = [part.unsqueeze(2) for part in shares.split(list(sizes), dim=1)]
    # A sample without data has zeros to divide.
    totals = [weight.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) for weight in weights]
    each = zip(parts, weights, totals, strict=True)
    return [(part * weight).sum(dim=1, keepdim=True) / total for part, weight, total in each]
