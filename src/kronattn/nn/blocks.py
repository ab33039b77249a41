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
from kronattn.nn.grid_attention import GridAttention
from kronattn.nn.plain import is_plain
from kronattn.ops.fx import is_captured

__all__ = ["AttnModule", "AttnSkipModule", "BaseModule", "BaseSkipModule", "ConvNormAct", "Layer", "ReLU6"]

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
        return batch_norm_act(self.conv(x), self.norm, self.act, concat)


class _Bottleneck(nn.Module):
    """What the four share: a check of the arguments, the skip from input to output, the last convolution."""

    def __init__(
        self, in_channels: int, out_channels: int, *, stride: int, expansion: float, norm_layer: Layer
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
        self.project = ConvNormAct(self.expanded, out_channels, norm_layer=norm_layer, act_layer=None)

    def _project_both(self, first: Tensor, second: Tensor) -> Tensor:
        """The last convolution of two maps side by side, as a sum of two: nothing is copied to be concatenated."""
        weight, count = self.project.conv.weight, first.shape[1]
        y = _plus_product(_product(weight[:, :count], first), weight[:, count:], second)
        return self.project.act(self.project.norm(y))

    def dilate(self, rate: int) -> None:
        """Take the stride away, and set the taps of the depth-wise convolution ``rate`` apart: features at a smaller
        output stride from the weights of a larger one. What the module adds to its output stays as it was."""
        self.stride = 1
        depthwise = getattr(self, "depthwise", None)
        if depthwise is not None:
            depthwise.conv.stride = (1, 1)
            depthwise.conv.dilation = depthwise.conv.padding = (rate, rate)


class BaseModule(_Bottleneck):
    """BaseModule: MobileNetV2's bottleneck with inverted residuals.

    1×1 convolution to rc channels, 3×3 depth-wise convolution of stride s, 1×1 convolution to d channels; the
    input is added where s = 1 and c = d. At r = 1 there is nothing to expand, and no first convolution.

    Example:
        >>> BaseModule(16, 24, stride=2)(torch.randn(1, 16, 15, 20)).shape
        torch.Size([1, 24, 8, 10])
    """

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
        super().__init__(in_channels, out_channels, stride=stride, expansion=expansion, norm_layer=norm_layer)
        layers: dict[str, Any] = {"norm_layer": norm_layer, "act_layer": act_layer}
        new = self._new_channels()
        self.expand = ConvNormAct(in_channels, new, **layers) if new else None
        self.depthwise = ConvNormAct(
            self.expanded, self.expanded, kernel_size=3, stride=stride, groups=self.expanded, **layers
        )

    def _new_channels(self) -> int:
        """How many channels the first convolution makes; 0 where there is no first convolution."""
        return 0 if self.expanded == self.in_channels else self.expanded

    def forward(self, x: Tensor) -> Tensor:
        expanded = x if self.expand is None else self.expand(x)
        y = self.project(self.depthwise(expanded))
        return x + y if self.skips else y


class BaseSkipModule(BaseModule):
    """BaseSkipModule: a BaseModule whose first convolution makes (r − 1)c channels, concatenated with the input.

    The c input channels join the (r − 1)c new ones: fewer parameters, feature reuse, a shorter way back for the
    gradient.

    Example:
        >>> BaseSkipModule(16, 24, stride=2)(torch.randn(1, 16, 15, 20)).shape
        torch.Size([1, 24, 8, 10])
    """

    def _new_channels(self) -> int:
        return self.expanded - self.in_channels

    def forward(self, x: Tensor) -> Tensor:
        if self.expand is None:
            y = self.project(self.depthwise(x))
        elif self._goes_in_parts(x):
            y = self._project_parts(self.expand(x), x)
        else:
            y = self.project(self.depthwise(self.expand(x, concat=x)))
        return x + y if self.skips else y

    def _goes_in_parts(self, x: Any) -> bool:
        """Whether inference is better off without the concatenation: where copying the widest tensor takes longer
        than a few calls more. A compiler arranges this by itself, our kernels write both parts where they belong,
        and a batch norm in training needs all channels."""
        if isinstance(x, fx.Proxy) or self.training or torch.is_grad_enabled() or is_captured():
            return False
        new = x.numel() // self.in_channels * self._new_channels()
        norm = self.depthwise.norm
        return (
            new >= _WORTH_PARTS
            and isinstance(norm, nn.BatchNorm2d)
            and norm.running_mean is not None
            and is_plain(self.depthwise.conv, norm, self.project.conv)
            and batch_norm_unsupported_reason(x) is not None
        )

    def _project_parts(self, new: Tensor, x: Tensor) -> Tensor:
        """The depth-wise convolution sees one channel at a time, so it can do the new ones and x's one by one."""
        count = new.shape[1]
        parts = self._depthwise_part(new, slice(0, count)), self._depthwise_part(x, slice(count, None))
        return self._project_both(*parts)

    def _depthwise_part(self, x: Tensor, channels: slice) -> Tensor:
        conv, norm = self.depthwise.conv, cast(Any, self.depthwise.norm)
        y = F.conv2d(x, conv.weight[channels], None, conv.stride, conv.padding, conv.dilation, groups=x.shape[1])
        tensors = norm.running_mean, norm.running_var, norm.weight, norm.bias
        mean, var, weight, bias = (None if tensor is None else tensor[channels] for tensor in tensors)
        return self.depthwise.act(F.batch_norm(y, mean, var, weight, bias, eps=norm.eps))


class AttnModule(_Bottleneck):
    """AttnModule: a bottleneck of expansion r − 1 beside an attention operator that gives the missing c channels.

    The original path extracts local features, the attention path global ones from the module's input (average
    pooled by s where s > 1). The last convolution reads both.

    Args:
        in_channels: c.
        out_channels: d.
        stride: s.
        expansion: r; at r = 1 the attention path is the only one.
        attn_layer: builds any attention from its number of channels; ``KroneckerAttention`` by default.
        norm_layer, act_layer: build the norm and the activation of the convolutions.

    Example:
        >>> from kronattn.nn import DenseAttention
        >>> AttnModule(16, 24, stride=2, attn_layer=DenseAttention)(torch.randn(1, 16, 15, 20)).shape
        torch.Size([1, 24, 8, 10])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        stride: int = 1,
        expansion: float = 6,
        attn_layer: Layer = KroneckerAttention,
        norm_layer: Layer = nn.BatchNorm2d,
        act_layer: Layer = ReLU6,
    ) -> None:
        super().__init__(in_channels, out_channels, stride=stride, expansion=expansion, norm_layer=norm_layer)
        layers: dict[str, Any] = {"norm_layer": norm_layer, "act_layer": act_layer}
        new = self.expanded - in_channels
        self.expand = ConvNormAct(in_channels, new, **layers) if new else None
        self.depthwise = ConvNormAct(new, new, kernel_size=3, stride=stride, groups=new, **layers) if new else None
        self.attn = attn_layer(in_channels)

    def forward(self, x: Tensor) -> Tensor:
        attended = self._attend(x)
        if self.expand is None or self.depthwise is None:
            y = self.project(attended)
        elif self._projects_parts(attended):
            y = self._project_both(self.depthwise(self.expand(x)), attended)
        else:
            y = self.project(self.depthwise(self.expand(x), concat=attended))
        return x + y if self.skips else y

    def _projects_parts(self, attended: Any) -> bool:
        """Whether the last convolution takes both paths one by one: on a CPU that saves a copy of both, on a GPU the
        norm's kernel writes both where they belong, and a compiler lets the norm do so."""
        if isinstance(attended, fx.Proxy) or attended.is_cuda:
            return False
        return is_plain(self.project.conv)

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
        if self.stride > 1:
            return super()._attend(x)
        # Our own layers can add the input on the way out; any other layer gives its output first.
        return self.attn(x, residual=x) if isinstance(self.attn, GridAttention | ContextLayer) else self.attn(x) + x


def _product(weight: Tensor, x: Tensor) -> Tensor:
    """A 1×1 convolution of x with part of another's weight, in x's memory format.

    In inference as a matrix product, which takes the part as it lies; a convolution would copy it at every call.
    """
    if torch.is_grad_enabled() or is_captured():
        return F.conv2d(x, weight)
    matrix = weight.flatten(1)
    if x.stride(1) == 1:
        return F.linear(x.permute(0, 2, 3, 1), matrix).permute(0, 3, 1, 2)
    return torch.matmul(matrix, x.flatten(2)).view(x.shape[0], -1, *x.shape[2:])


def _plus_product(y: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """y plus a 1×1 convolution of x, added up inside the matrix product, in y's memory format."""
    matrix = weight.flatten(1)
    if y.stride(1) == 1:
        rows = torch.addmm(y.permute(0, 2, 3, 1).flatten(0, 2), x.permute(0, 2, 3, 1).flatten(0, 2), matrix.t())
        return rows.view(y.shape[0], *y.shape[2:], -1).permute(0, 3, 1, 2)
    columns = torch.baddbmm(y.flatten(2), matrix.expand(y.shape[0], *matrix.shape), x.flatten(2))
    return columns.view(y.shape)
