"""Images with masks that are kept decoded, on any device, and prepared there in whole batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kronattn.data.decoded import DecodedSamples

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
    height, width = (max(mask.shape[at] for _, mask in pairs) for at in (0, 1))
    pixels = torch.zeros((len(pairs), 3, height, width), dtype=torch.uint8)
    masks = torch.zeros((len(pairs), height, width), dtype=torch.uint8)
    for index, (image, mask) in enumerate(pairs):
        h, w = mask.shape
        pixels[index, :, :h, :w] = image
        masks[index, :h, :w] = mask
    return {"pixels": pixels, "masks": masks, "sizes": torch.tensor([list(mask.shape) for _, mask in pairs])}
