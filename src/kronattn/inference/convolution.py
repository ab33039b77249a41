"""Convolutions with their norm multiplied in.

Each has two forms. For PyTorch, channels lie side by side and a 1×1 convolution is a matrix product on rows: what its
CPU runs fastest. The portable form is convolutions alone, into which other runtimes fold activations and sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

from kronattn.nn.blocks import ConvNormAct
from kronattn.ops.compat import has_hooks
from kronattn.ops.fx import is_captured

__all__ = ["FusedConv", "FusedPointwise", "act_or_none", "add_into", "as_rows", "constant", "folded", "fused_conv"]


def as_rows(x: Tensor) -> Tensor:
    """(N, C, h, w) as (N, h·w, C): a view of what is channels-last."""
    return x.permute(0, 2, 3, 1).flatten(1, 2)


def add_into(y: Tensor, x: Tensor) -> Tensor:
    """y + x, in y's memory unless a graph is captured: ``y`` must be new."""
    return y + x if is_captured() else y.add_(x)


def folded(module: ConvNormAct) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution with its norm multiplied in, in the convolution's dtype."""
    assert isinstance(module.norm, nn.BatchNorm2d)
    conv = fuse_conv_bn_eval(module.conv, module.norm)
    assert conv.bias is not None
    return conv.weight.detach(), conv.bias.detach()


def act_or_none(act: nn.Module | None) -> nn.Module | None:
    """An activation that does something, or None: on a small map a call takes as long as the arithmetic."""
    return None if isinstance(act, nn.Identity) and not has_hooks(act) else act


def fused_conv(module: ConvNormAct, portable: bool = False) -> nn.Module:
    """The whole of a ConvNormAct as one module."""
    weight, bias = folded(module)
    conv = module.conv
    if conv.kernel_size == conv.stride == (1, 1) and conv.groups == 1 and conv.padding == (0, 0):
        return FusedPointwise(weight, bias, module.act, portable=portable)
    return FusedConv(conv, weight, bias, module.act, portable=portable)


class FusedConv(nn.Module):
    """A convolution of given weights with another's stride, padding and dilation, and an activation."""

    def __init__(
        self, like: nn.Conv2d, weight: Tensor, bias: Tensor | None, act: nn.Module, *, portable: bool = False
    ) -> None:
        super().__init__()
        self.portable = portable
        memory_format = torch.contiguous_format if portable else torch.channels_last
        # Copies: parts of one tensor would be written together with the whole of it.
        self.weight = constant(weight.clone(memory_format=memory_format))
        self.bias = None if bias is None else constant(bias.clone())
        self.act = act_or_none(act)
        self.stride, self.padding, self.dilation = like.stride, like.padding, like.dilation
        self.groups = like.groups if like.groups == 1 else len(weight)

    def forward(self, x: Tensor) -> Tensor:
        if not self.portable:
            # Depth-wise convolutions are several times faster with channels side by side.
            x = x.contiguous(memory_format=torch.channels_last)
        y = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        return y if self.act is None else self.act(y)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1] * self.groups}, {self.weight.shape[0]}, stride={self.stride[0]}"


class FusedPointwise(nn.Module):
    """A 1×1 convolution and an activation."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, act: nn.Module | None = None, *, portable: bool = False
    ) -> None:
        super().__init__()
        self.portable = portable
        matrix = weight.reshape(*weight.shape[:2], 1, 1) if portable else weight.flatten(1)
        self.weight = constant(matrix.clone(memory_format=torch.contiguous_format))
        self.bias = None if bias is None else constant(bias.clone())
        self.act = act_or_none(act)

    def forward(self, x: Tensor) -> Tensor:
        if self.portable:
            y = F.conv2d(x, self.weight, self.bias)
        else:
            y = F.linear(x.permute(0, 2, 3, 1), self.weight, self.bias).permute(0, 3, 1, 2)
        return y if self.act is None else self.act(y)

    def add_to(self, y: Tensor, x: Tensor) -> Tensor:
        """``y``, which must be new, plus the convolution of ``x``, added up inside the matrix product."""
        if self.portable or self.bias is not None:
            return add_into(y, self(x))
        y.permute(0, 2, 3, 1).flatten(0, 2).addmm_(x.permute(0, 2, 3, 1).flatten(0, 2), self.weight.t())
        return y

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"


def constant(tensor: Tensor) -> nn.Parameter:
    """A tensor of a module's own that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)
