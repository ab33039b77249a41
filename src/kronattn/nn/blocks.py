"""The paper's four modules (section 3.5): MobileNetV2's bottleneck, with a skip, with attention, with both.

All take (N, in_channels, h, w) to (N, out_channels, ⌈h/stride⌉, ⌈w/stride⌉). Written as in the paper, with c input
channels, d output channels, an expansion rate r and a stride s; c·r is rounded where r is not whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from kronattn.nn.attention import KroneckerAttention
from kronattn.nn.batch_norm_act import batch_norm_act, batch_norm_unsupported_reason
from kronattn.nn.context_layer import ContextLayer
from kronattn.nn.convolution import convolve
from kronattn.nn.grid_attention import GridAttention
from kronattn.nn.plain import is_plain
from kronattn.nn.side_by_side import side_by_side
from kronattn.ops.compat import has_hooks
from kronattn.ops.fx import is_captured

__all__ = [
    "AttnModule",
    "AttnSkipModule",
    "BaseModule",
    "BaseSkipModule",
    "ConvNormAct",
    "Layer",
    "ReLU6",
    "plus_input",
]

Layer = Callable[..., nn.Module]

# Elements of a concatenation from which on leaving it out is faster. Measured on two cores at batch 1 and 16.
_WORTH_PARTS = 2**19


class ReLU6(nn.ReLU6):
    """min(max(x, 0), 6), in place where no gradient is recorded: nobody else needs what a norm gives.

    With a gradient to come, working in place would mean a copy of the input first.

    >>> ReLU6()(torch.tensor([-1.0, 1.0, 7.0]))
    tensor([0., 1., 6.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x, inplace=not (torch.is_grad_enabled() or is_captured()))


class ConvNormAct(nn.Module):
    """A convolution without bias, a norm and, unless ``act_layer`` is None, an activation.

    (N, in_channels, h, w) to (N, out_channels, ⌈h/stride⌉, ⌈w/stride⌉) for any odd kernel size; the channels of
    ``concat``, where it is given, come after those.

    Example:
        >>> ConvNormAct(3, 32, kernel_size=3, stride=2)(torch.randn(1, 3, 33, 40)).shape
        torch.Size([1, 32, 17, 20])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel_size: int = 1,
        stride: int = 1,
        groups: int = 1,
        norm_layer: Layer = nn.BatchNorm2d,
        act_layer: Layer | None = ReLU6,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, groups=groups, bias=False
        )
        self.norm = norm_layer(out_channels)
        self.act = nn.Identity() if act_layer is None else act_layer()

    def forward(self, x: Tensor, concat: Tensor | None = None) -> Tensor:
        return batch_norm_act(convolve(self.conv, x), self.norm, self.act, concat)


class Bottleneck(nn.Module):
    """What the four share: a 1×1 convolution, a 3×3 depth-wise one, a 1×1 one, and the skip from input to output."""

    depthwise: ConvNormAct | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        stride: int = 1,
        expansion: float = 6,
        norm_layer: Layer = nn.BatchNorm2d,
        act_layer: Layer = ReLU6,
    ) -> None:
        super().__init__()
        if min(in_channels, out_channels) < 1:
            raise ValueError(f"channels must be at least 1, not {in_channels} in and {out_channels} out")
        if stride < 1:
            raise ValueError(f"stride must be at least 1, not {stride}")
        if expansion < 1:
            raise ValueError(f"expansion must be at least 1, not {expansion}")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.stride = stride
        self.expanded = round(expansion * in_channels)  # rc
        self.skips = stride == 1 and in_channels == out_channels
        layers: dict[str, Any] = {"norm_layer": norm_layer, "act_layer": act_layer}
        new, wide = self._channels()
        self.project = ConvNormAct(self.expanded, out_channels, norm_layer=norm_layer, act_layer=None)
        self.expand = ConvNormAct(in_channels, new, **layers) if new else None
        self.depthwise = ConvNormAct(wide, wide, kernel_size=3, stride=stride, groups=wide, **layers) if wide else None

    def _channels(self) -> tuple[int, int]:
        """How many channels the first convolution makes and the depth-wise one has; 0 where there is none."""
        raise NotImplementedError

    def _branch(self, x: Tensor) -> Tensor:
        """(N, c, h, w) to what the input is added to, where it is."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        y = self._branch(x)
        return x + y if self.skips else y

    def dilate(self, rate: int) -> None:
        """Take the stride away, and set the taps of the depth-wise convolution ``rate`` apart: features at a smaller
        output stride from the weights of a larger one. What the module adds to its output stays as it was."""
        self.stride = 1
        if self.depthwise is not None:
            self.depthwise.conv.stride = (1, 1)
            self.depthwise.conv.dilation = self.depthwise.conv.padding = (rate, rate)


class BaseModule(Bottleneck):
    """BaseModule: MobileNetV2's bottleneck with inverted residuals.

    1×1 convolution to rc channels, 3×3 depth-wise convolution of stride s, 1×1 convolution to d channels; the
    input is added where s = 1 and c = d. At r = 1 there is nothing to expand, and no first convolution.

    Args:
        in_channels: c.
        out_channels: d.
        stride: s; 1 by default.
        expansion: r; 6 by default.
        norm_layer, act_layer: build the norm and the activation of the convolutions.

    Example:
        >>> BaseModule(16, 24, stride=2)(torch.randn(1, 16, 15, 20)).shape
        torch.Size([1, 24, 8, 10])
    """

    depthwise: ConvNormAct

    def _channels(self) -> tuple[int, int]:
        return 0 if self.expanded == self.in_channels else self.expanded, self.expanded

    def _branch(self, x: Tensor) -> Tensor:
        return self.project(self.depthwise(x if self.expand is None else self.expand(x)))


class BaseSkipModule(BaseModule):
    """BaseSkipModule: a BaseModule whose first convolution makes (r − 1)c channels, concatenated with the input.

    The c input channels join the (r − 1)c new ones: fewer parameters, feature reuse, a shorter way back for the
    gradient.

    Example:
        >>> BaseSkipModule(16, 24, stride=2)(torch.randn(1, 16, 15, 20)).shape
        torch.Size([1, 24, 8, 10])
    """

    def _channels(self) -> tuple[int, int]:
        return self.expanded - self.in_channels, self.expanded

    def _branch(self, x: Tensor) -> Tensor:
        if self.expand is None:
            return super()._branch(x)
        if self._goes_in_parts(x):
            return self._in_parts(self.expand(x), x)
        return self.project(self.depthwise(self.expand(x, concat=x)))

    def _goes_in_parts(self, x: Any) -> bool:
        """Whether inference is better off without the concatenation: where copying the widest tensor takes longer
        than a few calls more. A compiler arranges this by itself, our kernels write both parts where they belong,
        and a batch norm in training needs all channels."""
        if isinstance(x, fx.Proxy) or self.training or torch.is_grad_enabled() or is_captured():
            return False
        new = x.numel() // self.in_channels * self._channels()[0]
        norm = self.depthwise.norm
        return (
            new >= _WORTH_PARTS
            and isinstance(norm, nn.BatchNorm2d)
            and norm.running_mean is not None
            and is_plain(self.depthwise.conv, norm, self.project.conv)
            and not any(map(has_hooks, (self.depthwise, self.depthwise.act, self.project)))
            and batch_norm_unsupported_reason(x) is not None
        )

    def _in_parts(self, new: Tensor, x: Tensor) -> Tensor:
        """The depth-wise convolution sees one channel at a time, so it can do the new ones and x's one by one; the
        last one is then a sum of two matrix products, which take their parts of its weight as they lie."""
        count, matrix = new.shape[1], self.project.conv.weight.flatten(1)
        parts = self._depthwise_part(new, slice(0, count)), self._depthwise_part(x, slice(count, None))
        batch, _, *grid = parts[0].shape
        if parts[0].stride(1) == 1:
            rows = [part.permute(0, 2, 3, 1).flatten(0, 2) for part in parts]
            y = torch.addmm(F.linear(rows[0], matrix[:, :count]), rows[1], matrix[:, count:].t())
            y = y.view(batch, *grid, -1).permute(0, 3, 1, 2)
        else:
            columns = [part.flatten(2) for part in parts]
            old = matrix[:, count:].expand(batch, -1, -1)
            y = torch.baddbmm(torch.matmul(matrix[:, :count], columns[0]), old, columns[1]).view(batch, -1, *grid)
        return self.project.act(self.project.norm(y))

    def _depthwise_part(self, x: Tensor, channels: slice) -> Tensor:
        conv, norm = self.depthwise.conv, cast(Any, self.depthwise.norm)
        y = F.conv2d(x, conv.weight[channels], None, conv.stride, conv.padding, conv.dilation, groups=x.shape[1])
        tensors = norm.running_mean, norm.running_var, norm.weight, norm.bias
        mean, var, weight, bias = (None if tensor is None else tensor[channels] for tensor in tensors)
        return self.depthwise.act(F.batch_norm(y, mean, var, weight, bias, eps=norm.eps))


class AttnModule(Bottleneck):
    """AttnModule: a bottleneck of expansion r − 1 beside an attention operator that gives the missing c channels.

    The original path extracts local features, the attention path global ones from the module's input; what it gives is
    average pooled by s where s > 1. The last convolution reads both. At r = 1 the attention path is the only one.

    Args:
        in_channels: c.
        out_channels: d.
        attn_layer: builds any attention from its number of channels; ``KroneckerAttention`` by default.
        options: stride, expansion, norm_layer and act_layer, as in :class:`BaseModule`.

    Example:
        >>> from kronattn.nn import DenseAttention
        >>> AttnModule(16, 24, stride=2, attn_layer=DenseAttention)(torch.randn(1, 16, 15, 20)).shape
        torch.Size([1, 24, 8, 10])
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, attn_layer: Layer = KroneckerAttention, **options: Any
    ) -> None:
        super().__init__(in_channels, out_channels, **options)
        self.attn = attn_layer(in_channels)

    def _channels(self) -> tuple[int, int]:
        new = self.expanded - self.in_channels
        return new, new

    def _branch(self, x: Tensor) -> Tensor:
        if self.expand is None or self.depthwise is None:
            return self.project(self._attend(x))
        attended, new = side_by_side(self._attend, self.expand, x)
        return self.project(self.depthwise(new, concat=attended))

    def _attend(self, x: Tensor) -> Tensor:
        attended = self.attn(x)
        return attended if self.stride == 1 else F.avg_pool2d(attended, self.stride, ceil_mode=True)


class AttnSkipModule(AttnModule):
    """AttnSkipModule: an AttnModule that adds its input to what the attention gives, where s = 1.

    Example:
        >>> AttnSkipModule(16, 24)(torch.randn(1, 16, 15, 20)).shape
        torch.Size([1, 24, 15, 20])
    """

    def _attend(self, x: Tensor) -> Tensor:
        return super()._attend(x) if self.stride > 1 else plus_input(self.attn, x)


def plus_input(layer: nn.Module, x: Tensor) -> Tensor:
    """What a layer gives, plus its input. Our own add it on the way out; any other layer gives its output first."""
    output: Tensor = layer(x, residual=x) if isinstance(layer, GridAttention | ContextLayer) else layer(x) + x
    return output
