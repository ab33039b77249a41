"""Batch norm on the coefficient matrix, from its moments alone."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kronattn.ops import matrix_products, stages
from kronattn.ops.autocast import without_autocast
from kronattn.ops.coefficients import Moments
from kronattn.ops.compat import needs_dispatcher
from kronattn.ops.fx import is_captured, leaf_module
from kronattn.ops.plan import Plan

__all__ = ["CoefficientNorm", "synchronise_coefficient_norms"]


class CoefficientNorm(nn.Module):
    """Batch norm of E = KᵀQ before its softmax, as a scale of the keys (and a shift of each key's coefficients).

    E is never needed: its mean and variance are (see :mod:`kronattn.ops.coefficients`). Parameters and buffers have
    ``nn.BatchNorm1d``'s names and meaning. ``nn.SyncBatchNorm.convert_sync_batchnorm`` leaves this norm alone:
    :func:`synchronise_coefficient_norms` shares its statistics among processes, on any device.

    Args:
        num_heads: one channel for each head: the whole coefficient matrix of a head shares a mean and a variance.
            The softmax ignores a common shift, so there is a scale to learn and no shift.
        num_keys: with a number, one channel for each key of each head, with scale and shift. The number of keys
            is then fixed.
        eps, momentum: as in ``nn.BatchNorm1d``.

    Example:
        >>> from kronattn.ops.coefficients import token_moments
        >>> norm, queries, keys = CoefficientNorm(num_heads=2), torch.randn(4, 50, 8), torch.randn(4, 15, 8)
        >>> normed, bias = norm(keys, token_moments(queries, keys, num_heads=2))
        >>> normed.shape, bias
        (torch.Size([4, 15, 8]), None)
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_heads: int = 1,
        *,
        num_keys: int | None = None,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_keys = num_keys
        self.eps = eps
        self.momentum = momentum
        self.synchronised = False
        self.process_group: Any = None
        channels = num_heads * (num_keys or 1)
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(channels, **like))
        self.bias = None if num_keys is None else nn.Parameter(torch.empty(channels, **like))
        self.register_buffer("running_mean", torch.zeros(channels, **like))
        self.register_buffer("running_var", torch.ones(channels, **like))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale 1, shift 0, no statistics yet."""
        self.running_mean.zero_()
        self.running_var.fill_(1)
        self.num_batches_tracked.zero_()
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @leaf_module
    def forward(
        self, keys: Tensor, moments: Moments | None = None, plan: Plan | None = None, *, softmax_of: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The keys multiplied so that E is normed, and what to add to each key's coefficients.

        Args:
            keys: (N, S, C), the channels of all heads; or E itself, of one head, as
                :func:`kronattn.ops.stages.coefficients` materialises it.
            moments: of E, in training; without them the running statistics are used.
            plan: of the layer's call.
            softmax_of: how many keys E has, where it is E: its softmax is taken, too.

        Returns:
            (N, S, C), and None or, with ``num_keys``, a (num_heads, S) tensor.
        """
        if self.num_keys is not None and keys.shape[1] != self.num_keys:
            raise ValueError(
                f"batch norm for each key was built for {self.num_keys} keys, but the input has {keys.shape[1]}; "
                f'use coefficient_norm="batch" for input of any size'
            )
        with without_autocast(keys):
            if plan is not None and plan.pool == "triton" and self._is_for_kernel(keys, moments):
                running = self.running_mean, self.running_var, self.num_batches_tracked
                constants: Any = {"eps": self.eps, "momentum": self.momentum, "num_heads": self.num_heads}
                return stages.normalise(keys, self.weight, moments, running, softmax_of=softmax_of, **constants), None
            scale, bias = self.scale_and_bias(moments, update=self.training)
            normed = stages.scaled(keys, scale, self.num_heads)
            return normed if softmax_of is None else matrix_products.softmax(normed, softmax_of), bias

    def scale_and_bias(self, moments: Moments | None, *, update: bool = False) -> tuple[Tensor, Tensor | None]:
        """What to multiply the keys by, (num_heads,) or (num_heads, S), and what to add to their coefficients.

        ``update``: whether the running statistics follow the moments.
        """
        if moments is None or (not isinstance(moments.members, Tensor) and moments.members == 0):
            mean, variance = self.running_mean, self.running_var
        else:
            mean, variance = self._batch_statistics(moments, update)
        scale = torch.rsqrt(variance + self.eps) * self.weight
        if self.bias is None:
            return scale, None
        return scale.view(self.num_heads, -1), (self.bias - mean * scale).view(self.num_heads, -1)

    def _is_for_kernel(self, keys: Tensor, moments: Moments | None) -> bool:
        """Whether one launch can do it all: statistics of this process, a momentum, no bias, and nobody watching."""
        if self.bias is not None or self.momentum is None or is_captured() or needs_dispatcher(keys):
            return False
        if type(self.weight) is not nn.Parameter or self._shares_statistics():
            return False
        if moments is None:
            # It has no gradient by the running statistics.
            return not (torch.is_grad_enabled() and (keys.requires_grad or self.weight.requires_grad))
        return self.training and not isinstance(moments.members, Tensor) and moments.members > 1

    def _batch_statistics(self, moments: Moments, update: bool) -> tuple[Tensor, Tensor]:
        members, mean, squares = moments.members, moments.mean.flatten(), moments.squares.flatten()
        if self._shares_statistics():
            members, mean, squares = _synchronise(Moments(members, mean, squares), self.process_group)
        elif not isinstance(members, Tensor) and members == 1:
            raise ValueError("batch norm of the coefficients needs more than one coefficient in a training batch")
        others, known = members - 1, None
        if isinstance(members, Tensor):
            # A mask may leave none: zero over one, and nothing learned of it.
            known = members > 0
            members, others = members.clamp_min(1), (members - 1).clamp_min(1)
        if update:
            with torch.no_grad():
                self._update_running(mean.detach(), squares.detach() / others, known)
        return mean, squares / members

    def _shares_statistics(self) -> bool:
        if not self.synchronised:
            return False
        return dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1

    def _update_running(self, mean: Tensor, variance: Tensor, known: Tensor | None) -> None:
        self.num_batches_tracked.add_(1)
        weight: float | Tensor = self.momentum if self.momentum is not None else 1.0 / self.num_batches_tracked.float()
        if known is not None:
            weight = known.to(self.running_mean.dtype) * weight
        for running, current in ((self.running_mean, mean), (self.running_var, variance)):
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
    members = moments.mean.new_ones(1) * moments.members
    totals = _AllSum.apply(torch.cat([members, members * moments.mean]), group)
    everyone, mean = totals[:1], totals[1:] / totals[:1].clamp_min(1)
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
        return _AllSum.apply(gradient, ctx.group), None
