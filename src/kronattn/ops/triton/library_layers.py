"""The attention layer as an operator of PyTorch's own library, for torch.compile.

As :mod:`.library`, for a whole layer. The operator changes nothing in place: batch statistics are given back, and the
running ones are brought up to date beside it, where the compiler sees that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kronattn.ops.coefficients import NormState
from kronattn.ops.triton import layer
from kronattn.ops.triton.layer_backward import input_gradient, token_gradients
from kronattn.ops.triton.layout import empty_like_grid, is_channels_last

__all__ = ["attention_layer"]


@torch.library.custom_op("kronattn::layer", mutates_args=())
def _layer(
    x: Tensor,
    weight: Tensor | None,
    gain: Tensor | None,
    variance: Tensor | None,
    mode: str,
    num_heads: int,
    scale: float,
    eps: float,
    skip: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A layer's output, averages, values, and its coefficients' mean, variance and pull; empty where there is none.

    ``gain`` without ``variance``: the statistics are the batch's.
    """
    settings = _settings(x, gain, variance, mode, num_heads, scale, eps, skip)
    y, tokens, values, _, mean, found, pulled = layer.forward(x, weight, gain, None, settings, with_gradient=True)
    if values is None:
        values = x.new_empty(0)
    if pulled is None:
        mean, found, pulled = (x.new_empty(0, dtype=torch.float32) for _ in range(3))
    else:
        pulled = pulled[0] if pulled.shape[0] == 1 else pulled.sum(dim=0)
    return y, tokens, values, mean, found, pulled


@torch.library.custom_op("kronattn::layer_backward", mutates_args=())
def _layer_backward(
    d_y: Tensor,
    x: Tensor,
    weight: Tensor | None,
    gain: Tensor | None,
    variance: Tensor | None,
    tokens: Tensor,
    values: Tensor,
    mean: Tensor,
    found: Tensor,
    pulled: Tensor,
    mode: str,
    num_heads: int,
    scale: float,
    eps: float,
    skip: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    of_batch = gain is not None and variance is None
    spread = found if of_batch else variance
    received = tokens if weight is None else values
    d_keys, d_values, d_gain, pull = token_gradients(
        d_y, x, tokens, received, spread, gain, mode, num_heads, scale, eps, of_batch
    )
    if weight is None:
        mapped, d_weight = d_values, x.new_empty(0)
    else:
        rows = d_values.flatten(0, 1)
        mapped = torch.mm(rows, weight).view(tokens.shape)
        d_weight = torch.mm(rows.t(), tokens.flatten(0, 1))
    d_x = input_gradient(
        d_y, x, tokens, received, d_keys, mapped, mean if of_batch else None, spread, gain, pull,
        pulled.unsqueeze(0) if of_batch else None, mode, num_heads, scale, eps, skip,
    )  # fmt: skip
    return d_x, d_weight, x.new_empty(0) if d_gain is None or gain is None else d_gain.to(gain.dtype)


def _settings(
    x: Tensor, gain: Tensor | None, variance: Tensor | None, mode: str, num_heads: int, scale: float, eps: float,
    skip: bool,
) -> layer.Settings:  # fmt: skip
    norm = None
    if gain is not None:
        # Statistics that nobody keeps, whatever they hold: the operator must not change anything.
        unused = torch.empty(2, num_heads, device=x.device)
        batches = torch.empty((), dtype=torch.int64, device=x.device)
        running = unused[1] if variance is None else variance
        norm = NormState(gain, unused[0], running, batches, 0.0, eps, variance is None)
    return layer.Settings(mode, num_heads, scale, norm, skip)


def _empty_parts(
    x: Tensor, weight: Tensor | None, gain: Tensor | None, variance: Tensor | None, num_heads: int
) -> list[Tensor]:
    """What the forward gives beside y, uninitialised."""
    batch, channels, height, width = x.shape
    of_batch = gain is not None and variance is None
    tokens = batch, width + height
    return [
        x.new_empty((*tokens, channels)),
        x.new_empty(0 if weight is None else (*tokens, weight.shape[0])),
        x.new_empty(num_heads if of_batch else 0, dtype=torch.float32),
        x.new_empty(num_heads if of_batch else 0, dtype=torch.float32),
        x.new_empty((*tokens, channels) if of_batch else 0, dtype=torch.float32),
    ]


@_layer.register_fake
def _(
    x: Tensor, weight: Tensor | None, gain: Tensor | None, variance: Tensor | None, mode: str, num_heads: int,
    scale: float, eps: float, skip: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    values = x.shape[1] if weight is None else weight.shape[0]
    tokens, mapped, mean, found, pulled = _empty_parts(x, weight, gain, variance, num_heads)
    return empty_like_grid(x, values, is_channels_last(x)), tokens, mapped, mean, found, pulled


@_layer_backward.register_fake
def _(d_y: Tensor, x: Tensor, weight: Tensor | None, gain: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        empty_like_grid(x, x.shape[1], is_channels_last(x)),
        x.new_empty(0 if weight is None else weight.shape),
        x.new_empty(0) if gain is None else gain.new_empty(gain.shape),
    )


def _save_layer(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, gain, variance, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, gain, variance, *output[1:])
    ctx.set_materialize_grads(False)


def _layer_gradient(ctx: Any, d_y: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    if d_y is None:
        return (None,) * 9
    weight, gain = ctx.saved_tensors[1:3]
    d_x, d_weight, d_gain = _layer_backward(d_y, *ctx.saved_tensors, *ctx.rest)
    return d_x, None if weight is None else d_weight, None if gain is None else d_gain, *[None] * 6


_layer.register_autograd(_layer_gradient, setup_context=_save_layer)


def attention_layer(
    x: Tensor,
    weight: Tensor | None,
    norm: NormState | None,
    added: Tensor | None,
    *,
    mode: str,
    num_heads: int,
    scale: float,
) -> Tensor:
    """:func:`kronattn.ops.triton.layer.attention_layer` in a graph that is being captured."""
    skip = added is x
    gain, running, eps = (None, None, 0.0) if norm is None else (norm.gain, norm.running_var, norm.eps)
    of_batch = norm is not None and norm.of_the_batch
    cast = None if weight is None else weight.to(x.dtype)
    y, _, _, mean, variance, _ = _layer(
        x, cast, gain, None if of_batch else running, mode, num_heads, float(scale), eps, skip
    )
    if norm is not None and of_batch:
        height, width = x.shape[2:]
        members = x.shape[0] * (height + width) * (height * width if mode == "kv" else height + width)
        with torch.no_grad():
            norm.batches.add_(1)
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
            unbiased = variance * (members / (members - 1))
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)
    return y if added is None or skip else y + added
