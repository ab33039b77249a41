"""A small U-Net for images or volumes, with a context layer at its bottom and in its skips.

After Ronneberger, Fischer, Brox: *U-Net: Convolutional Networks for Biomedical Image Segmentation*, MICCAI 2015,
https://arxiv.org/abs/1505.04597, with padded convolutions. The norms are batch norms: instance norm, usual for volumes,
subtracts a mean over the whole grid, which is global context by another name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.models.inputs import checked_input
from kronattn.nn.blocks import plus_input
from kronattn.nn.context_registry import context_builder
from kronattn.nn.grid_attention import GridAttention
from kronattn.ops.checks import check_positive_int
from kronattn.ops.fx import leaf_function

__all__ = ["UNETS", "UNET_VOLUMES", "UNet"]

PLACES = ("bottom", "skips")
# By the study of gates: a default that was measured in this network.
DEFAULT_CONTEXT = "kao_kv:gate=true"

_CONVOLUTIONS: dict[int, Any] = {2: nn.Conv2d, 3: nn.Conv3d}
_NORMS: dict[int, Any] = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_POOLS: dict[int, Any] = {2: F.max_pool2d, 3: F.max_pool3d}


class UNet(nn.Module):
    """A U-Net whose context layer is its only way to see further than its convolutions.

    Args:
        num_classes: to tell apart at every position.
        in_chans: channels of the image.
        axes: 2 for images, 3 for volumes.
        widths: channels at each resolution, the finest first; the last are those of the bottom.
        context: the layer, one of ``kronattn.nn.list_contexts()``, or what builds one from its number of channels.
            What it gives is added to its input; "none" leaves it out. KAO_KV with its gate by default, which was ahead
            of the plain layer on seeds that had no part in choosing it (``results/study-gate-short.json``).
        context_options: the layer's own, such as ``num_heads``.
        places: where it stands: "bottom", "skips". The finest skip has none: that is where regular attention would not
            fit, and all are to stand in the same places.

    Shape:
        (N, in_chans, *grid) of any grid to (N, num_classes, *grid).

    Example:
        >>> UNet(num_classes=5, context="kao_kv", widths=(8, 16, 32))(torch.randn(2, 3, 30, 41)).shape
        torch.Size([2, 5, 30, 41])
        >>> UNet(num_classes=3, in_chans=1, axes=3, widths=(4, 8), context="none")(torch.randn(1, 1, 9, 8, 7)).shape
        torch.Size([1, 3, 9, 8, 7])
    """

    def __init__(
        self,
        *,
        num_classes: int = 21,
        in_chans: int = 3,
        axes: int = 2,
        widths: Sequence[int] = (16, 32, 64, 128),
        context: str | Callable[..., nn.Module] = DEFAULT_CONTEXT,
        context_options: Mapping[str, Any] | None = None,
        places: Sequence[str] = PLACES,
    ) -> None:
        super().__init__()
        check_positive_int("num_classes", num_classes)
        check_positive_int("in_chans", in_chans)
        if axes not in _CONVOLUTIONS:
            raise ValueError(f"axes must be 2 or 3, not {axes!r}")
        if len(widths) < 2 or min(widths) < 1:
            raise ValueError(f"widths must be two numbers of channels or more, from 1 up, not {tuple(widths)}")
        if unknown := [place for place in places if place not in PLACES]:
            raise ValueError(f"places must be of {', '.join(PLACES)}, not {unknown[0]!r}")
        self.num_classes, self.in_chans, self.axes = num_classes, in_chans, axes
        build = context_builder(context, **(context_options or {}))
        if isinstance(context, str):
            build = partial(build, axes=axes)

        def placed(channels: int, wanted: bool) -> nn.Module:
            return _WithContext(build(channels)) if wanted and context != "none" else nn.Identity()

        self.down = nn.ModuleList()
        channels = in_chans
        for width in widths:
            self.down.append(_Block(channels, width, axes))
            channels = width
        self.bottom = placed(channels, "bottom" in places)
        self.skips = nn.ModuleList(
            placed(width, "skips" in places and level > 0) for level, width in enumerate(widths[:-1])
        )
        self.up = nn.ModuleList(_Block(below + width, width, axes) for width, below in pairwise(widths))
        self.classifier = _CONVOLUTIONS[axes](widths[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = checked_input(x, self.in_chans, self.axes)
        kept: list[Tensor] = []
        for level, block in enumerate(self.down):
            # Rounded up: the last row of an odd grid is not lost.
            x = block(_POOLS[self.axes](x, 2, ceil_mode=True) if level else x)
            kept.append(x)
        x = self.bottom(kept.pop())
        for skip, block in reversed(list(zip(self.skips, self.up, strict=True))):
            finer = kept.pop()
            x = block(torch.cat((resized(x, finer), skip(finer)), 1))
        return self.classifier(x)

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def reset_classifier(self, num_classes: int) -> None:
        """A new last convolution for ``num_classes``; everything before it stays."""
        check_positive_int("num_classes", num_classes)
        old: Any = self.classifier
        like = {"device": old.weight.device, "dtype": old.weight.dtype}
        self.classifier = _CONVOLUTIONS[self.axes](old.in_channels, num_classes, 1, **like)
        self.num_classes = num_classes

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The scales of the coefficients' norm, and positions: decay would flatten the attention."""
        layers = [name for name, module in self.named_modules() if isinstance(module, GridAttention)]
        spared = tuple(f"{layer}.{part}." for layer in layers for part in ("norm", "positions"))
        return {name for name, _ in self.named_parameters() if name.startswith(spared)}


class _Block(nn.Sequential):
    """Two 3-wide convolutions, each with its norm and activation."""

    def __init__(self, channels: int, out_channels: int, axes: int) -> None:
        layers: list[nn.Module] = []
        for width in (channels, out_channels):
            # A bias would go under in the norm.
            layers += [
                _CONVOLUTIONS[axes](width, out_channels, 3, padding=1, bias=False),
                _NORMS[axes](out_channels),
                nn.ReLU(),
            ]
        super().__init__(*layers)


class _WithContext(nn.Module):
    """A grid plus its context."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.attn = layer

    def forward(self, x: Tensor) -> Tensor:
        return plus_input(self.attn, x)


@leaf_function
def resized(x: Tensor, like: Tensor) -> Tensor:
    """The grid of ``x`` at the size of ``like``'s, each value repeated: exact, and the same bits every time."""
    return F.interpolate(x, size=like.shape[2:], mode="nearest")


UNETS: dict[str, Callable[..., nn.Module]] = {"unet": UNet}
UNET_VOLUMES: dict[str, Callable[..., nn.Module]] = {"unet3d": partial(UNet, axes=3, in_chans=1)}
