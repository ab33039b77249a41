"""SeaFormer's attention: along each axis by itself between averages, and a convolution that brings the details back."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.nn.context_layer import ContextLayer, add_residual, axis_tokens, split_axes
from kronattn.ops.checks import check_heads, check_positive_int
from kronattn.ops.fx import leaf_function, leaf_module
from kronattn.ops.torch_backend import spread, spread_tokens

__all__ = ["AxisPositions", "SqueezeAxial"]

_CONVOLUTIONS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_NORMS: dict[int, type[nn.Module]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}

# Positions that SeaFormer learns along an axis.
_LEARNED = 16
_POSITIONS_STD = 0.02


class SqueezeAxial(ContextLayer):
    """Squeeze-enhanced axial attention: rows attend to rows and columns to columns, by their averages.

    y = h-sigmoid(map of the context) · details. With q, k, v of all positions and their averages q_a, k_a, v_a over all
    axes but a, the context is Σ over the axes a of softmax((q_a + r_a)·(k_a + s_a)/√d)·v_a, added up over the grid as
    in KAO_QKV; r and s are learned for each axis and interpolated to its size. The details are a depth-wise convolution
    of q, k and v side by side, mapped. Wan, Huang, Lu, Yu, Zhang: *SeaFormer: Squeeze-enhanced Axial Transformer for
    Mobile Semantic Segmentation*, ICLR 2023, https://arxiv.org/abs/2301.13156; for volumes too.

    Args:
        channels: of the input.
        axes: of the grid, 1 to 3: as many as PyTorch's convolutions have.
        num_heads: divides the channels of q, k and v.
        qk_channels: of q and k; half of ``channels`` by default.

    Example:
        >>> SqueezeAxial(64, axes=3, num_heads=4)(torch.randn(2, 64, 3, 5, 6)).shape
        torch.Size([2, 64, 3, 5, 6])
    """

    most_axes = max(_CONVOLUTIONS)
    shown = ("axes", "num_heads", "qk_channels")

    def __init__(
        self,
        channels: int,
        *,
        axes: int = 2,
        num_heads: int = 1,
        qk_channels: int | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(channels, axes=axes)
        check_heads(num_heads, channels, "value")
        qk_channels = max(channels // 2 // num_heads, 1) * num_heads if qk_channels is None else qk_channels
        check_positive_int("qk_channels", qk_channels)
        check_heads(num_heads, qk_channels, "query")
        self.num_heads = num_heads
        self.qk_channels = qk_channels
        self.scale = (qk_channels // num_heads) ** -0.5
        width = 2 * qk_channels + channels
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        conv, norm = _CONVOLUTIONS[axes], _NORMS[axes]
        # q, k and v side by side: one map, and what the convolution of the details reads.
        self.qkv_map = conv(channels, width, 1, bias=False, **like)
        self.qkv_norm = norm(width, **like)
        self.query_positions = AxisPositions(qk_channels, axes, **like)
        self.key_positions = AxisPositions(qk_channels, axes, **like)
        self.context_act = nn.ReLU()
        self.context_map = conv(channels, channels, 1, bias=False, **like)
        self.context_norm = norm(channels, **like)
        self.gate = nn.Hardsigmoid()
        self.depthwise = conv(width, width, 3, padding=1, groups=width, bias=False, **like)
        self.depthwise_norm = norm(width, **like)
        self.depthwise_act = nn.ReLU()
        self.detail_map = conv(width, channels, 1, bias=False, **like)
        self.detail_norm = norm(channels, **like)

    def _context(self, x: Tensor, residual: Tensor | None) -> Tensor:
        qkv = self.qkv_norm(self.qkv_map(x))
        tokens = axis_tokens(qkv)
        queries = tokens[..., : self.qk_channels] + self.query_positions(tokens, x)
        keys = tokens[..., self.qk_channels : 2 * self.qk_channels] + self.key_positions(tokens, x)
        values = tokens[..., 2 * self.qk_channels :]
        context = spread_tokens(attend_along_axes(queries, keys * self.scale, values, x, self.num_heads), x)
        gate = self.gate(self.context_norm(self.context_map(self.context_act(context))))
        details = self.detail_norm(self.detail_map(self.depthwise_act(self.depthwise_norm(self.depthwise(qkv)))))
        return add_residual(gate * details, residual)


class AxisPositions(nn.Module):
    """A learned vector for each place along each axis, interpolated linearly to any size.

    (N, sum(grid), C) tokens of (N, any, *grid) to (sum(grid), C), the last axis first, in the tokens' dtype.

    Example:
        >>> AxisPositions(4, axes=2)(torch.randn(1, 11, 4), torch.randn(1, 3, 5, 6)).shape
        torch.Size([11, 4])
    """

    def __init__(
        self, channels: int, axes: int, *, places: int = _LEARNED, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(axes, channels, places, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small, so that the features decide at first."""
        nn.init.normal_(self.weight, std=_POSITIONS_STD)

    @leaf_module
    def forward(self, tokens: Tensor, like: Tensor) -> Tensor:
        # Maps of one row: PyTorch has a deterministic gradient for "bilinear" on a GPU, but none for "linear".
        rows = self.weight.unsqueeze(2)
        parts = [
            F.interpolate(rows[axis : axis + 1], size=(1, like.shape[2 + axis]), mode="bilinear", align_corners=False)
            for axis in reversed(range(len(rows)))
        ]
        return torch.cat(parts, dim=3)[0, :, 0].t().to(tokens.dtype)

    def extra_repr(self) -> str:
        return "{1}, axes={0}, places={2}".format(*self.weight.shape)


@leaf_function
def attend_along_axes(queries: Tensor, keys: Tensor, values: Tensor, like: Tensor, num_heads: int) -> Tensor:
    """Attention of the (N, sum(grid), C) tokens of each axis to those of the same axis: (N, sum(grid), P)."""
    triples = zip(*(split_axes(tokens, like) for tokens in (queries, keys, values)), strict=True)
    # Averages are a grid of one axis.
    parts = [spread(q.transpose(1, 2), k, v, num_heads=num_heads).transpose(1, 2) for q, k, v in triples]
    # Tokens have the last axis first.
    return torch.cat(parts[::-1], dim=1)
