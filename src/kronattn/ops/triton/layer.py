"""A whole attention layer over an image: averages, value map, batch norm of the coefficients, attention, skip.

The map of the values is PyTorch's own matrix product on the few averages. Everything else is in the kernels: what a
network's layer launches decides how fast the network is in eager mode, more than what it computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kronattn.ops import plain as torch_backend
from kronattn.ops.autocast import autocast_is_on, without_autocast
from kronattn.ops.coefficients import NormState, coefficient_moments
from kronattn.ops.triton.attend import attend_forward
from kronattn.ops.triton.layer_backward import input_gradient, token_gradients
from kronattn.ops.triton.moments import statistics_of, summarise
from kronattn.ops.triton.operators import seen_by_others
from kronattn.ops.triton.rules import most_layer_keys
from kronattn.ops.triton.selfattention import tokens_forward

__all__ = ["Settings", "attention_layer", "forward", "plain", "plain_gradients"]


class Settings(NamedTuple):
    """What a layer is beside its tensors."""

    mode: str
    num_heads: int
    scale: float
    norm: NormState | None
    skip: bool  # x itself is added to the output


def attention_layer(
    x: Tensor,
    value_weight: Tensor | None,
    norm: NormState | None,
    added: Tensor | None,
    *,
    mode: str,
    num_heads: int,
    scale: float,
) -> Tensor | None:
    """Kronecker attention of (N, C, h, w) to itself with what a layer has around it.

    Args:
        value_weight: (P, C), the map of the values; without it they are the keys.
        norm: of the coefficients.
        added: (N, P, h, w), added to the output.

    Returns:
        (N, P, h, w) in x's dtype and memory format; None where the kernels cannot do all of it at once.
    """
    gains = () if norm is None else (norm.gain,)
    weights = () if value_weight is None else (value_weight,)
    with_gradient = torch.is_grad_enabled() and any(
        y is not None and y.requires_grad for y in (x, *weights, *gains, added)
    )
    if not _fits(x, value_weight, norm, mode, num_heads, with_gradient):
        return None
    if torch.compiler.is_compiling():
        from kronattn.ops.triton.library_layers import attention_layer as captured

        return captured(x, value_weight, norm, added, mode=mode, num_heads=num_heads, scale=scale)
    skip = added is x
    settings = Settings(mode, num_heads, scale, norm, skip)
    gain = None if norm is None else norm.gain
    added = None if skip else added
    if with_gradient:
        return _Layer.apply(x, value_weight, gain, added, settings)
    return forward(x, value_weight, gain, added, settings, with_gradient=False)[0]


def _fits(
    x: Tensor, weight: Tensor | None, norm: NormState | None, mode: str, num_heads: int, with_gradient: bool
) -> bool:
    if x.dim() != 4:
        return False
    dtype = torch.get_autocast_dtype(x.device.type) if autocast_is_on(x) else None
    if weight is not None and x.dtype != (dtype or weight.dtype):
        return False
    batch, channels, height, width = x.shape
    values = channels if weight is None else weight.shape[0]
    most_keys = most_layer_keys(int(channels) // num_heads, int(values) // num_heads, x.element_size(), mode)
    if torch.compiler.is_compiling():
        return height + width <= most_keys
    if seen_by_others():
        return False
    if not with_gradient and (norm is None or not norm.of_the_batch):
        return True
    if batch * (height + width) == 2:
        return False  # a single coefficient, perhaps: the plain path says what is wrong with it
    return height + width <= most_keys


def forward(
    x: Tensor,
    weight: Tensor | None,
    gain: Tensor | None,
    added: Tensor | None,
    settings: Settings,
    *,
    with_gradient: bool,
) -> tuple[Any, ...]:
    """The output, and what the backward starts from."""
    mode, heads, scale, norm, skip = settings
    tokens, mean, variance, pulled = summarise(x, mode, heads, scale, *statistics_of(norm), with_gradient)
    if norm is not None and variance is None:
        variance = norm.running_var
    cast = values = None
    if weight is not None:
        cast = weight.detach().to(x.dtype)
        values = F.linear(tokens, cast)
    received = tokens if values is None else values
    options: dict[str, Any] = {"num_heads": heads, "scale": scale, "added": x if skip else added}
    if norm is not None:
        options |= {"variance": variance, "gain": gain, "eps": norm.eps}
    if mode == "kv":
        y = attend_forward(x, tokens, received, **options)
    else:
        y = tokens_forward(tokens, tokens, received, x, **options)
    return y, tokens, values, cast, mean, variance, pulled


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, gain: Tensor | None, added: Tensor | None, settings: Settings
    ) -> Tensor:
        y, *saved = forward(x, weight, gain, added, settings, with_gradient=True)
        ctx.save_for_backward(x, weight, gain, *saved)
        # The running statistics are not needed again, and must not be kept from changing.
        ctx.settings, ctx.has_added = settings, added is not None
        return y

    @staticmethod
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gain, tokens, values, cast, mean, variance, pulled = ctx.saved_tensors
        mode, heads, scale, norm, skip = ctx.settings
        d_added = d_y if ctx.has_added else None
        with without_autocast(x):
            if torch.is_grad_enabled():
                return *plain_gradients(x, weight, gain, variance, ctx.settings, d_y, again=True), d_added, None
            received = tokens if values is None else values
            eps, of_batch = (0.0, False) if norm is None else (norm.eps, norm.of_the_batch)
            d_keys, d_values, d_gain, pull = token_gradients(
                d_y, x, tokens, received, variance, gain, mode, heads, scale, eps, of_batch
            )
            mapped, d_weight = d_values, None
            if cast is not None:
                rows = d_values.flatten(0, 1)
                mapped = torch.mm(rows, cast).view(tokens.shape)
                if ctx.needs_input_grad[1]:
                    d_weight = torch.mm(rows.t(), tokens.flatten(0, 1)).to(weight.dtype)
            d_x = None
            if ctx.needs_input_grad[0]:
                d_x = input_gradient(
                    d_y, x, tokens, received, d_keys, mapped, mean, variance, gain, pull, pulled,
                    mode, heads, scale, eps, skip,
                )  # fmt: skip
            return d_x, d_weight, None if d_gain is None else d_gain.to(gain.dtype), d_added, None


def plain_gradients(
    x: Any, weight: Any, gain: Any, variance: Tensor | None, settings: Settings, d_y: Tensor, *, again: bool = False
) -> list[Tensor | None]:
    """The gradients of x, weight and gain by the torch backend; with ``again``, they can be differentiated."""
    with torch.enable_grad():
        leaves = [
            y if y is None or (again and y.requires_grad) else y.detach().requires_grad_() for y in (x, weight, gain)
        ]
        output = plain(leaves[0], leaves[1], leaves[2], variance, settings)[0]
        given = [y for y in leaves if y is not None]
        gradients = iter(torch.autograd.grad(output, given, d_y, create_graph=again))
    return [None if y is None else next(gradients) for y in leaves]


def plain(
    x: Tensor, weight: Tensor | None, gain: Tensor | None, variance: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The layer by the torch backend: its output, and the coefficients' mean and variance where they are computed."""
    mode, heads, scale, norm, skip = settings
    averages = torch_backend.axis_averages(x)
    values = averages if weight is None else weight.to(averages.dtype) @ averages
    keys = averages * scale
    mean = None
    if norm is not None and gain is not None:
        if norm.of_the_batch:
            queries = averages if mode == "qkv" else x.flatten(2)
            moments = coefficient_moments(queries.unflatten(1, (heads, -1)), keys.unflatten(1, (heads, -1)))
            mean, variance = moments.mean, moments.squares / moments.members
        assert variance is not None
        factor = gain * torch.rsqrt(variance + norm.eps)
        keys = (keys.unflatten(1, (heads, -1)) * factor.view(-1, 1, 1)).flatten(1, 2)
    y = torch_backend.attend_averages(
        x, keys, values, queries=averages if mode == "qkv" else None, num_heads=heads, added=x if skip else None
    )
    return y, mean, variance
