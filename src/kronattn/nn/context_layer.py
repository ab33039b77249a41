"""What layers that give a feature map global context share: checks, pooling, and the way back to the grid."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from kronattn.ops.autocast import autocasted
from kronattn.ops.checks import MAX_AXES, check_dtype, check_grid_tensor, check_positive_int, check_residual
from kronattn.ops.fx import leaf_function
from kronattn.ops.grid import wide_averages

__all__ = [
    "ContextLayer",
    "add_residual",
    "axis_tokens",
    "check_context_input",
    "grid_mean",
    "split_axes",
    "spread_vector",
]


class ContextLayer(nn.Module):
    """(N, channels, *grid) to (N, channels, *grid), where every output depends on the whole grid.

    Args:
        channels: of the input and the output.
        axes: of the grid, where the layer has parameters for each axis; None for any number from 1 to 4.

    Attributes:
        most_axes: that ``axes`` can be.
        shown: names of what the layer's repr says beside its channels.
    """

    most_axes: ClassVar[int] = MAX_AXES
    shown: ClassVar[tuple[str, ...]] = ()

    def __init__(self, channels: int, *, axes: int | None = None) -> None:
        super().__init__()
        if axes is not None:
            if isinstance(axes, bool) or not isinstance(axes, int):
                raise TypeError(f"axes must be an int, not {type(axes).__name__}")
            if not 1 <= axes <= self.most_axes:
                raise ValueError(f"axes must lie between 1 and {self.most_axes}, not {axes}")
        check_positive_int("channels", channels)
        self.channels = channels
        self.axes = axes

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """The context of ``x``, plus ``residual``, which has the output's shape."""
        # Weights that are no tensors (quantised modules) have no dtype to compare with.
        dtype = next((parameter.dtype for parameter in self.parameters()), None)
        x, residual = check_context_input(
            x, residual, channels=self.channels, axes=self.axes, dtype=dtype, owner=type(self).__name__
        )
        return self._context(x, residual)

    def _context(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The same for input that has been checked, and is in autocast's dtype where that is on."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return ", ".join([f"{self.channels}", *(f"{name}={getattr(self, name)!r}" for name in self.shown)])


@leaf_function
def check_context_input(
    x: Tensor, residual: Tensor | None, *, channels: int, axes: int | None, dtype: torch.dtype | None, owner: str
) -> tuple[Tensor, Tensor | None]:
    """Input and residual of a layer called ``owner`` with weights of ``dtype``; in autocast's where that is on."""
    check_grid_tensor(x, "x")
    if x.shape[1] != channels:
        raise ValueError(f"{owner} was built for {channels} channels, but x has {x.shape[1]}")
    if axes is not None and x.dim() - 2 != axes:
        raise ValueError(
            f"{owner} was built for {axes} axes, but the grid of x, {tuple(x.shape[2:])}, has {x.dim() - 2}"
        )
    residual_is_x, x = residual is x, autocasted(x)
    check_dtype(x, "x", dtype, owner)
    return x, x if residual_is_x else check_residual(residual, x, channels)


@leaf_function
def grid_mean(x: Tensor) -> Tensor:
    """The mean over all positions of (N, C, *grid): (N, C) in x's dtype, added up in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.mean(dim=tuple(range(2, x.dim())), dtype=wide).to(x.dtype)


@leaf_function
def axis_tokens(x: Tensor, mean: str = "each") -> Tensor:
    """The axis averages of (N, C, *grid) as (N, sum(grid), C) tokens in x's dtype, the last axis first.

    With ``mean="once"`` each axis leaves out all but 1/d of the mean, so that an outer sum over d axes counts it once.
    """
    averages, axes = wide_averages(x), x.dim() - 2
    if mean == "once" and axes > 1:
        # Averages along any axis have the grid's mean as their own.
        averages = averages - (1 - 1 / axes) * averages[..., : x.shape[-1]].mean(dim=-1, keepdim=True)
    return averages.to(x.dtype).transpose(1, 2)


@leaf_function
def split_axes(tokens: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    """(N, sum(grid), C) tokens, the last axis first, as one (N, size, C) tensor for each axis, the first axis first."""
    return tokens.split(list(like.shape[2:])[::-1], dim=1)[::-1]


@leaf_function
def spread_vector(vector: Tensor, like: Tensor, residual: Tensor | None = None) -> Tensor:
    """(N, C) at every position of ``like``'s grid, in its dtype and memory format, plus ``residual``."""
    vector = vector.to(like.dtype).reshape(*vector.shape, *[1] * (like.dim() - 2))
    if residual is not None:
        return residual + vector
    vector = vector.expand(-1, -1, *like.shape[2:])
    return vector.movedim(1, -1).contiguous().movedim(-1, 1) if like.stride(1) == 1 else vector.contiguous()


@leaf_function
def add_residual(y: Tensor, residual: Tensor | None) -> Tensor:
    """``y`` plus ``residual``, where there is one."""
    return y if residual is None else y + residual
