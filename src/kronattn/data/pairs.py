"""Images with masks that are kept decoded, on any device, and prepared there in whole batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["DecodedPairs", "stack_pairs"]


class DecodedPairs(Dataset):
    """Images and masks, handed out a whole batch at a time.

    Args:
        pixels: (N, 3, H, W), uint8.
        masks: (N, H, W), uint8.
        sizes: (N, 2): each image's own height and width; what lies beyond is no part of it.
    """

    def __init__(self, pixels: Tensor, masks: Tensor, sizes: Tensor) -> None:
        self.pixels = pixels
        self.masks = masks
        self.sizes = sizes
        self.same_size = bool((sizes == sizes[:1]).all())

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels, masks and sizes of some; ``indices`` lie on the same device."""
        return self.pixels[indices], self.masks[indices], self.sizes[indices]

    def to(self, device: torch.device) -> DecodedPairs:
        return DecodedPairs(self.pixels.to(device), self.masks.to(device), self.sizes.to(device))


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
