"""Kronecker attention in front of a linear map, added into what that map gives: few operators, no module called."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.inference.convolution import as_rows, constant
from kronattn.nn import KroneckerAttention
from kronattn.nn.plain import is_plain
from kronattn.ops import native
from kronattn.ops.compat import has_hooks
from kronattn.ops.matrices import matrices_of

__all__ = ["FusedKroneckerAttention", "fused_attention"]


def fused_attention(
    layer: nn.Module, matrix: Tensor, direct: Tensor, portable: bool = False
) -> FusedKroneckerAttention | None:
    """``matrix`` times what ``layer`` gives at every position plus ``direct`` times its input, as one module; None for
    layers that it does not know.

    A layer may have options that nothing here has heard of, so the result is compared with the layer itself.

    Args:
        layer: an attention layer in evaluation mode.
        matrix: (d, channels).
        direct: (d, channels).
        portable: for other runtimes; see :mod:`kronattn.inference.convolution`.
    """
    if type(layer) is not KroneckerAttention or layer.num_heads > 1 or not set(layer.project) <= {"v"}:
        return None
    if has_hooks(layer):
        return None
    if layer.coefficient_norm not in (None, "batch") or layer.softmax != "joint" or layer.positions is not None:
        return None
    if not layer.is_linear_in_values or (layer.value_map is not None and not is_plain(layer.value_map)):
        return None
    fused = FusedKroneckerAttention(layer, matrix, direct, portable)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, layer.channels, 5, 7, generator=generator).to(matrix)
    with torch.no_grad():
        expected = torch.einsum("dc,nchw->ndhw", matrix, layer(x)) + torch.einsum("dc,nchw->ndhw", direct, x)
        found = fused(x, torch.zeros_like(expected, memory_format=torch.channels_last))
    tolerance = 1e-4 if matrix.dtype in (torch.float32, torch.float64) else 5e-2
    return fused if (found - expected).abs().max() <= tolerance * expected.abs().max() else None


class FusedKroneckerAttention(nn.Module):
    """y plus a linear map of the Kronecker attention of x plus another of x itself, for (N, c, h, w) x and (N, d, h, w)
    y.

    The first map and the layer's own map of the values are one matrix, applied to h + w averages; the norm of the
    coefficients and their scale are one number.
    """

    def __init__(self, layer: KroneckerAttention, matrix: Tensor, direct: Tensor, portable: bool = False) -> None:
        super().__init__()
        self.portable = portable
        self.mode, self.mean_once = layer.mode, layer.mean == "once"
        scale = torch.as_tensor(layer.scale, dtype=torch.float64)
        values = matrix.double()
        if layer.norm is not None:
            scale = (
                scale * layer.norm(torch.ones(1, 1, 1, device=matrix.device, dtype=matrix.dtype))[0].detach().double()
            )
        if layer.layer_scale is not None:
            values = values * layer.layer_scale.gain.detach().double()
        if layer.value_map is not None:
            values = values @ layer.value_map.weight.detach().double()
        self.scale = float(scale)
        # (c, d), and so is the other.
        self.values = constant(values.t().to(matrix.dtype, memory_format=torch.contiguous_format))
        self.zero = constant(matrix.new_zeros(()))
        # Or the weight of a convolution.
        direct = direct[..., None, None] if portable else direct.t()
        self.direct = constant(direct.clone(memory_format=torch.contiguous_format)) if direct.any() else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """``y``, which must be new, plus both maps."""
        return self._columns(x, y) if self.portable else self._rows(x, y)

    def _rows(self, x: Tensor, y: Tensor) -> Tensor:
        """With channels side by side, for PyTorch."""
        if native.serves(x):
            native.attend_own_averages_(y, x, self.values, self.direct, self.scale, self.mode == "qkv", self.mean_once)
            return y
        rows, output, matrices, batch = as_rows(x), as_rows(y), matrices_of(x), x.shape[0]
        if self.direct is not None:
            output.baddbmm_(rows, self.direct.expand(batch, -1, -1))
        if matrices is None:
            grid = x.permute(0, 2, 3, 1)
            averages = torch.cat([grid.mean(dim=1), grid.mean(dim=2)], dim=1)
        else:
            averages = torch.bmm(matrices[0].expand(batch, -1, -1), rows)
        values = averages @ self.values
        queries = rows if self.mode == "kv" else averages
        # Nothing is added; the scale is part of the product.
        coefficients = torch.baddbmm(self.zero, queries, averages.transpose(1, 2), beta=0, alpha=self.scale)
        weights = coefficients.softmax(dim=-1)
        if self.mode == "kv":
            output.baddbmm_(weights, values)
            return y
        tokens = torch.bmm(weights, values)
        if matrices is not None and self.mean_once:
            output.baddbmm_(matrices[1].expand(batch, -1, -1), tokens)
            return y
        width = x.shape[3]
        columns, lines = tokens[:, :width], tokens[:, width:]
        if self.mean_once:
            # Both carry the mean: half of each one's goes, all of it off the rows.
            lines = lines - (columns.mean(dim=1, keepdim=True) + lines.mean(dim=1, keepdim=True)) * 0.5
        y.permute(0, 2, 3, 1).add_(columns.unsqueeze(1)).add_(lines.unsqueeze(2))
        return y

    def _columns(self, x: Tensor, y: Tensor) -> Tensor:
        """With positions side by side, for runtimes that keep convolutions so and fold transpositions into products."""
        if self.direct is not None:
            y = y + F.conv2d(x, self.direct)
        width = x.shape[3]
        positions, matrices = x.flatten(2), matrices_of(x)
        if matrices is None:
            averages = torch.cat([x.mean(dim=2), x.mean(dim=3)], dim=-1)
        else:
            averages = positions @ matrices[0].t()
        values = averages.transpose(1, 2) @ self.values
        queries = positions if self.mode == "kv" else averages
        weights = (queries.transpose(1, 2) @ (averages * self.scale)).softmax(dim=-1)
        if self.mode == "kv":
            return y + (values.transpose(1, 2) @ weights.transpose(1, 2)).view(y.shape)
        tokens = (weights @ values).transpose(1, 2)
        if matrices is not None and self.mean_once:
            return y + (tokens @ matrices[1].t()).view(y.shape)
        columns, lines = tokens[..., :width], tokens[..., width:]
        if self.mean_once:
            lines = lines - (columns.mean(dim=-1, keepdim=True) + lines.mean(dim=-1, keepdim=True)) * 0.5
        return y + (columns.unsqueeze(2) + lines.unsqueeze(3))

    def extra_repr(self) -> str:
        return f"{self.values.shape[0]}, {self.values.shape[1]}, mode={self.mode!r}"
