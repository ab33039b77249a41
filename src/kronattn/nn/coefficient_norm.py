"""Batch norm on the coefficient matrix, from queries and keys alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kronattn.ops.autocast import without_autocast
from kronattn.ops.coefficients import Moments, NormState, coefficient_moments

__all__ = ["CoefficientNorm", "synchronise_coefficient_norms"]


class CoefficientNorm(nn.Module):
    """Batch norm of E = KᵀQ before its softmax, as a scale (and a shift) for each key: E is never built.

    The parameters and running statistics live in an ordinary ``nn.BatchNorm1d``, so that everything that knows
    batch norm (weight decay filters, freezing, averaging of weights, synchronisation across processes by
    ``nn.SyncBatchNorm.convert_sync_batchnorm``) treats it rightly. PyTorch's conversion is for GPUs alone;
    :func:`synchronise_coefficient_norms` does the same on any device.

    Args:
        num_heads: one channel for each head: the whole coefficient matrix of a head shares a mean and a variance.
            The softmax ignores a common shift, so there is a scale to learn and no shift.
        num_keys: with a number, one channel for each key of each head, with scale and shift. The number of keys
            is then fixed.
        eps, momentum: as in ``nn.BatchNorm1d``.

    Example:
        >>> norm = CoefficientNorm(num_heads=2)
        >>> scale, bias = norm(torch.randn(4, 2, 8, 50), torch.randn(4, 2, 8, 15))
        >>> scale.shape, bias
        (torch.Size([2, 1, 1]), None)
    """

    def __init__(
        self, num_heads: int = 1, *, num_keys: int | None = None, eps: float = 1e-5, momentum: float | None = 0.1
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_keys = num_keys
        self.synchronised = False
        self.process_group: Any = None
        self.bn = nn.BatchNorm1d(num_heads * (num_keys or 1), eps=eps, momentum=momentum)
        if num_keys is None:
            self.bn.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Scale 1, shift 0, no statistics yet."""
        # BatchNorm1d's own method expects a shift in the older versions of PyTorch.
        self.bn.reset_running_stats()
        nn.init.ones_(self.bn.weight)
        if self.bn.bias is not None:
            nn.init.zeros_(self.bn.bias)

    def forward(
        self, query: Tensor, key: Tensor, query_mean: Tensor | None = None, *, moments: Moments | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """What to multiply the keys by, and what to add to each key's coefficients.

        Args:
            query: (N, H, d, m) queries as columns.
            key: (N, H, d, n) keys as columns.
            query_mean: (N, H, d, 1), each sample's mean query where it is known already: saves a pass.
            moments: of KᵀQ where it was built.

        Returns:
            scale: (H, 1, 1), or (H, 1, n) with ``num_keys``: batch norm of KᵀQ is (scale·K)ᵀQ + bias.
            bias: None, or (H, n) with ``num_keys``.
        """
        if self.num_keys is not None and key.shape[-1] != self.num_keys:
            raise ValueError(
                f"batch norm for each key was built for {self.num_keys} keys, but the input has {key.shape[-1]}; "
                f'use coefficient_norm="batch" for input of any size'
            )
        if self.uses_batch_statistics and query.shape[0]:
            with without_autocast(query):
                mean, variance = self._batch_statistics(query, key, query_mean, moments)
        else:
            mean, variance = self._running_statistics(query)
        scale = torch.rsqrt(variance + self.bn.eps)
        if self.bn.weight is not None:
            scale = scale * self.bn.weight
        if self.num_keys is None:
            return scale.view(-1, 1, 1), None
        bias = -mean * scale if self.bn.bias is None else self.bn.bias - mean * scale
        return scale.view(self.num_heads, 1, -1), bias.view(self.num_heads, -1)

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether the statistics are this batch's, as in training, rather than the running ones."""
        return self.bn.training or self.bn.running_var is None

    def state(self) -> NormState | None:
        """The norm as a kernel takes it; None where it is not one scale a head from this process's statistics."""
        bn = self.bn
        if (
            self.num_keys is not None
            or type(bn) is not nn.BatchNorm1d
            or self._forward_hooks
            or self._shares_statistics()
        ):
            return None
        if bn.weight is None or bn.momentum is None or bn.running_mean is None or bn.running_var is None:
            return None
        assert bn.num_batches_tracked is not None
        return NormState(
            bn.weight, bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.momentum, bn.eps, bn.training
        )

    def _batch_statistics(
        self, query: Tensor, key: Tensor, query_mean: Tensor | None, moments: Moments | None
    ) -> tuple[Tensor, Tensor]:
        if moments is None:
            moments = coefficient_moments(query, key, per_key=self.num_keys is not None, query_mean=query_mean)
        mean, squares = moments.mean.flatten(), moments.squares.flatten()
        members: int | Tensor = moments.members
        if self.bn.training and self._shares_statistics():
            members, mean, squares = _synchronise(Moments(moments.members, mean, squares), self._group())
        elif members == 1:
            raise ValueError(
                "batch norm of the coefficients needs more than one coefficient in a training batch: "
                f"got query {tuple(query.shape)} and key {tuple(key.shape)}"
            )
        if self.bn.training and self.bn.running_var is not None:
            with torch.no_grad():
                self._update_running(mean.detach(), squares.detach() / (members - 1))
        return mean, squares / members

    def _shares_statistics(self) -> bool:
        if not (self.synchronised or isinstance(self.bn, nn.SyncBatchNorm)):
            return False
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self._group()) > 1

    def _group(self) -> Any:
        return self.bn.process_group if isinstance(self.bn, nn.SyncBatchNorm) else self.process_group

    def _running_statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self.bn.running_mean is not None and self.bn.running_var is not None:
            return self.bn.running_mean, self.bn.running_var
        # An empty batch and nothing tracked: any finite statistics will do.
        return like.new_zeros(self.bn.num_features), like.new_ones(self.bn.num_features)

    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        bn = self.bn
        assert bn.running_mean is not None
        assert bn.running_var is not None
        assert bn.num_batches_tracked is not None
        bn.num_batches_tracked.add_(1)
        weight: float | Tensor = bn.momentum if bn.momentum is not None else 1.0 / bn.num_batches_tracked.float()
        for running, current in ((bn.running_mean, mean), (bn.running_var, variance)):
            running.lerp_(current.to(running.dtype), weight)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, num_keys={self.num_keys}"


def synchronise_coefficient_norms(module: nn.Module, process_group: Any = None) -> nn.Module:
    """Share the coefficients' batch statistics among all processes, for every attention inside ``module``.

    ``process_group`` is that of torch.distributed; all processes by default. Returns ``module`` itself.

    Example:
        >>> from kronattn.nn import KroneckerAttention
        >>> layer = synchronise_coefficient_norms(KroneckerAttention(8))
        >>> layer.norm.synchronised
        True
    """
    for child in module.modules():
        if isinstance(child, CoefficientNorm):
            child.synchronised = True
            child.process_group = process_group
    return module


def _synchronise(moments: Moments, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of the batch across all processes; gradients flow back to each of them."""
    members = moments.mean.new_tensor([float(moments.members)])
    totals = _AllSum.apply(torch.cat([members, members * moments.mean]), group)
    everyone, mean = totals[:1], totals[1:] / totals[:1]
    # The deviation of this process's mean is known once the common mean is: a second, equally small message.
    squares = _AllSum.apply(moments.squares + members * (moments.mean - mean).square(), group)
    return everyone.detach(), mean, squares


class _AllSum(torch.autograd.Function):
    """The sum over all processes, and in the backward the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
