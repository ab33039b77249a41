"""Batch norm and the activation after it at once, on a GPU: for modules, which fall back to PyTorch's own where this
gives nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kronattn.ops.triton.layout import row_distance
from kronattn.ops.triton.rules import norm_refused

__all__ = ["fuses_norms", "norm_act_at_once"]

# Offsets are 32-bit integers, also in the output, which has the channels of both.
_MOST = 2**30

# What is known of the shapes and activations that have been seen.
_bounds: dict[Any, tuple[float, float, bool] | None] = {}
_MOST_KEYS = 4096

# What an activation clamps to; None for one that does nothing.
_LIMITS: dict[type[nn.Module], tuple[float, float] | None] = {
    nn.ReLU6: (0.0, 6.0),
    nn.ReLU: (0.0, float("inf")),
    nn.Identity: None,
}


def fuses_norms(x: Tensor) -> bool:
    """Whether :func:`norm_act_at_once` serves maps like ``x``, where it can serve the norm and the activation.

    >>> fuses_norms(torch.randn(1, 2, 3, 3))
    False
    """
    return not norm_refused(x) and row_distance(x) is not None


def norm_act_at_once(x: Tensor, norm: nn.Module, act: nn.Module, beside: Tensor | None = None) -> Tensor | None:
    """act(norm(x)) and, channel after channel, ``beside``; None where the kernels cannot do that.

    Args:
        x: (N, C, h, w), half precision, channels last, on a GPU. It is not needed by anyone else.
        norm: an nn.BatchNorm2d in training, or in evaluation where no gradient is recorded.
        act: an nn.ReLU6, nn.ReLU or nn.Identity; subclasses that only say when to work in place count too.
        beside: (N, c, h, w), to be concatenated.

    Returns:
        (N, C + c, h, w), channels last.

    Example:
        >>> norm_act_at_once(torch.randn(1, 2, 3, 3), nn.BatchNorm2d(2), nn.ReLU6()) is None
        True
    """
    if norm_refused(x) or type(norm) is not nn.BatchNorm2d or _has_hooks(norm) or _has_hooks(act):
        return None
    training = norm.training
    key = (
        x.dtype, x.shape, x.stride(), x.device,
        None if beside is None else (beside.dtype, beside.shape, beside.stride()),
        type(act), training,
    )  # fmt: skip
    if key not in _bounds:
        if len(_bounds) >= _MOST_KEYS:
            _bounds.clear()
        _bounds[key] = _bounds_of(x, act, beside)
    bounds = _bounds[key]
    # What nn.Module's attributes stand for: looking them up there is a good part of what a call costs.
    parameters, buffers = norm._parameters, norm._buffers
    weight, bias, momentum = parameters["weight"], parameters["bias"], norm.momentum
    mean, variance, batches = buffers["running_mean"], buffers["running_var"], buffers["num_batches_tracked"]
    if bounds is None or weight is None or bias is None or momentum is None:
        return None
    if mean is None or variance is None or batches is None or weight.device != x.device:
        return None
    if weight.dtype != torch.float32 or mean.dtype != torch.float32:
        return None
    if training:
        if x.numel() == x.shape[1]:
            return None  # PyTorch says what is wrong with a single value a channel
        from kronattn.ops.triton.norm_act import norm_act_in_training

        return norm_act_in_training(
            x, beside, mean, variance, batches, weight, bias, float(momentum), norm.eps, *bounds, key=key
        )
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad):
        return None
    from kronattn.ops.triton.norm_act import norm_act

    return norm_act(x, beside, mean, variance, weight, bias, norm.eps, *bounds, key=key)


def _bounds_of(x: Tensor, act: nn.Module, beside: Tensor | None) -> tuple[float, float, bool] | None:
    """What the activation clamps to, and whether it does; None where the kernels cannot take the tensors."""
    kind = next((kind for kind in (type(act), *type(act).__bases__) if kind in _LIMITS), None)
    if kind is None or not _fit(x, x) or (beside is not None and not _fit(beside, x)):
        return None
    limits = _LIMITS[kind]
    return (0.0, 0.0, False) if limits is None else (*limits, True)


def _fit(x: Tensor, like: Tensor) -> bool:
    distance = row_distance(x)
    if distance is None or x.dtype != like.dtype or x.shape[2:] != like.shape[2:]:
        return False
    return x.numel() // x.shape[1] * distance < _MOST


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
