"""Images with masks that are kept decoded, on any device, and prepared there in whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kronattn.data.decoded import DecodedSamples, stack_padded

__all__ = ["DecodedPairs", "stack_pairs"]


@dataclass(eq=False)
class DecodedPairs(DecodedSamples):
    """Images and masks.

    Args:
        pixels: (N, 3, H, W), uint8.
        masks: (N, H, W), uint8.
        sizes: (N, 2): each image's own height and width; what lies beyond is no part of it.
    """

    pixels: Tensor
    masks: Tensor
    sizes: Tensor

    @cached_property
    def same_size(self) -> bool:
        return bool((self.sizes == self.sizes[:1]).all())


def stack_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Images (3, h, w) and masks (h, w) of any sizes as what :class:`DecodedPairs` is made of.

    Example:
        >>> small, large = (torch.ones(3, 2, 5), torch.ones(2, 5)), (torch.ones(3, 4, 3), torch.ones(4, 3))
        >>> found = stack_pairs([small, large])
        >>> found["pixels"].shape, found["sizes"].tolist()
        (torch.Size([2, 3, 4, 5]), [[2, 5], [4, 3]])
    """
    images, masks = zip(*pairs, strict=True)
    sizes = torch.tensor([list(mask.shape) for mask in masks])
    return {"pixels": stack_padded(images), "masks": stack_padded(masks), "sizes": sizes}
