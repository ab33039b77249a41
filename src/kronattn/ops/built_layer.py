"""A self-attention layer over an image with its coefficients built, and its gradient by hand.

PyTorch could find the gradient of :mod:`kronattn.ops.built` by itself. But these are many operators on small tensors,
which may take a GPU less time than it takes to ask for them: by hand there are a fifth fewer, without autograd's own
work for each. And the gradient of the features, by far the largest tensor, is written once and added to in place,
rather than written for each of their uses in the layer and then added up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kronattn.ops import built
from kronattn.ops.attend import at_least_float32
from kronattn.ops.autocast import without_autocast
from kronattn.ops.backends import Backend
from kronattn.ops.coefficients import NormState
from kronattn.ops.grid import spread

__all__ = ["Settings", "self_attention"]


class Settings(NamedTuple):
    """What a layer is beside its tensors.

    ``norm`` takes this batch's statistics, and its running ones follow them; ``averages`` is the backend that takes the
    averages.
    """

    mode: str
    norm: NormState | None
    averages: Backend


def self_attention(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor | None,
    settings: Settings,
) -> Tensor:
    """Kronecker attention of (N, C, h, w) to itself, one head, with maps and the norm of the coefficients.

    Args:
        query_weight: (d, C). In mode "kv" it goes into the keys.
        key_weight: (d, C).
        value_weight: (p, C).

    Returns:
        (N, p, h, w) in x's dtype, channels last.
    """
    gain = None if settings.norm is None else settings.norm.gain
    output = _SelfAttention.apply(x, query_weight, key_weight, value_weight, gain, settings)
    # A view made inside an autograd function could not be modified in place by the caller.
    return output if settings.mode == "qkv" else output.transpose(1, 2).unflatten(2, x.shape[2:])


class _SelfAttention(torch.autograd.Function):
    """(N, p, h, w) in mode "qkv", and by rows, (N, h·w, p), in mode "kv"."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        value_weight: Tensor | None,
        gain: Tensor | None,
        settings: Settings,
    ) -> Tensor:
        mode, norm, backend = settings
        count = x.shape[2] + x.shape[3]
        averages = built.deviations(backend.axis_averages(x)).transpose(1, 2).to(x.dtype)
        cast = [None if weight is None else weight.to(x.dtype) for weight in (query_weight, key_weight, value_weight)]
        keys = _mapped(averages, cast[1])
        values = _restored(_mapped(averages, cast[2]), count)
        if mode == "qkv":
            queries = at_least_float32(_restored(_mapped(averages, cast[0]), count))
            asked, values = at_least_float32(keys), at_least_float32(values)
        else:
            queries = x.flatten(2).transpose(1, 2)
            asked = keys if cast[0] is None else F.linear(keys, cast[0].t())
        apart, shared = built.coefficients(queries.transpose(1, 2), asked.transpose(1, 2), count)
        scale = root = mean = None
        logits = apart
        if norm is not None and gain is not None:
            members, mean, squares = built.built_moments(apart, shared)
            _follow(norm, mean, squares / (members - 1))
            root = torch.rsqrt(squares / members + norm.eps)
            scale = gain * root
            logits = apart * scale.view(())
        weights = logits.softmax(dim=-1)
        output = torch.bmm(weights, values).to(x.dtype)
        ctx.save_for_backward(
            x, query_weight, key_weight, value_weight, gain,
            *cast, averages, keys, values, queries, asked, apart, shared, weights, scale, root, mean,
        )  # fmt: skip
        ctx.settings = settings
        return spread(output.transpose(1, 2), x.shape[2:]) if mode == "qkv" else output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(d_output):
            if torch.is_grad_enabled():
                return *_gradients_again(ctx.saved_tensors[:5], ctx.settings, d_output), None
            return *_gradients(ctx.saved_tensors, ctx.settings, d_output, ctx.needs_input_grad[0]), None


def _gradients(saved: Any, settings: Settings, d_output: Tensor, for_features: bool) -> list[Tensor | None]:
    x, *given, query_weight, key_weight, value_weight, averages, keys, values = saved[:11]
    queries, asked, apart, shared, weights, scale, root, mean = saved[11:]
    count, more = apart.shape[2], asked.shape[1] - apart.shape[2]
    if settings.mode == "qkv":
        wide = weights.dtype
        d_output = torch.cat([d_output.sum(dim=2, dtype=wide), d_output.sum(dim=3, dtype=wide)], dim=2).transpose(1, 2)
    d_values = torch.bmm(weights.transpose(1, 2), d_output)
    d_weights = torch.bmm(d_output, values.transpose(1, 2))
    d_logits = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)

    d_gain = None
    d_matrix = apart.new_empty(*apart.shape[:2], count + more)
    d_apart = d_matrix[..., :count]
    d_matrix[..., count:].zero_()
    if scale is None:
        d_apart.copy_(d_logits)
    else:
        d_scale = (d_logits * apart).sum(dtype=root.dtype)
        d_gain = d_scale * root
        # The scale is gain · (sum of squares / members + ε)^-½, and each coefficient's square is in that sum.
        pull = (d_scale * scale * root * root).view(()) / -apart.numel()
        torch.mul(apart, pull, out=d_apart)
        d_apart.addcmul_(d_logits, scale.view(()))
        d_matrix[..., count : count + 1] = (shared - mean) * (pull * count)

    d_asked = torch.bmm(d_matrix.transpose(1, 2), queries)
    d_x = d_query_weight = None
    pieces: list[tuple[Tensor, Tensor | None]] = [(_spread_over(d_values, more).to(x.dtype), value_weight)]
    if settings.mode == "qkv":
        pieces.append((_spread_over(torch.bmm(d_matrix, asked), more).to(x.dtype), query_weight))
    else:
        if for_features:
            d_x = torch.bmm(d_matrix, asked).transpose(1, 2).unflatten(2, x.shape[2:])
        if query_weight is not None:
            d_query_weight = torch.mm(keys.flatten(0, 1).t(), d_asked.flatten(0, 1))
            d_asked = F.linear(d_asked, query_weight)
    pieces.append((d_asked.to(x.dtype), key_weight))

    rows = averages.flatten(0, 1)
    d_maps = [None if weight is None else torch.mm(d.flatten(0, 1).t(), rows) for d, weight in pieces]
    d_value_weight, d_key_weight = d_maps[0], d_maps[-1]
    if settings.mode == "qkv":
        d_query_weight = d_maps[1]
    if for_features:
        d_x = settings.averages.averages_gradient(_of_averages(pieces, count), x, d_x)
    found = [d_query_weight, d_key_weight, d_value_weight, d_gain]
    return [d_x, *(d if d is None else d.to(of.dtype) for d, of in zip(found, given, strict=True))]


def _of_averages(pieces: list[tuple[Tensor, Tensor | None]], count: int) -> Tensor:
    """(N, C, count): the averages' gradient, in float32 at least, from those of all their maps."""
    (first, weight), *others = pieces
    total = first.flatten(0, 1) if weight is None else torch.mm(first.flatten(0, 1), weight)
    for gradient, weight in others:
        rows = gradient.flatten(0, 1)
        total = total + rows if weight is None else total.addmm_(rows, weight)
    received = at_least_float32(total.view(first.shape[0], first.shape[1], -1))
    apart, mean = received[:, :count], received[:, count : count + 1]
    return (apart + (mean - apart.sum(dim=1, keepdim=True)) / count).transpose(1, 2)


def _gradients_again(given: Any, settings: Settings, d_output: Tensor) -> list[Tensor | None]:
    """The same by autograd, so that they can be differentiated themselves."""
    leaves: list[Any] = [x if x is None or x.requires_grad else x.detach().requires_grad_() for x in given]
    wanted = [x for x in leaves if x is not None]
    x, query_weight, key_weight, value_weight, gain = leaves
    output = _plain(x, query_weight, key_weight, value_weight, gain, settings)
    gradients = iter(torch.autograd.grad(output, wanted, d_output, create_graph=True))
    return [None if x is None else next(gradients) for x in leaves]


def _plain(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor | None,
    gain: Tensor | None,
    settings: Settings,
) -> Tensor:
    mode, norm, backend = settings
    count = x.shape[2] + x.shape[3]
    averages = built.deviations(backend.axis_averages(x)).transpose(1, 2).to(x.dtype)

    def mapped(weight: Tensor | None) -> Tensor:
        return at_least_float32(_mapped(averages, None if weight is None else weight.to(x.dtype)))

    keys, values = mapped(key_weight), _restored(mapped(value_weight), count)
    if mode == "qkv":
        queries = _restored(mapped(query_weight), count)
    else:
        queries = at_least_float32(x.flatten(2).transpose(1, 2))
        keys = keys if query_weight is None else keys @ query_weight.to(keys.dtype)
    apart, shared = built.coefficients(queries.transpose(1, 2), keys.transpose(1, 2), count)
    scale = None
    if norm is not None and gain is not None:
        members, _, squares = built.built_moments(apart, shared)
        scale = gain * torch.rsqrt(squares / members + norm.eps)
    output = built.attend(apart, values.transpose(1, 2), scale).to(x.dtype)
    return spread(output, x.shape[2:]) if mode == "qkv" else output.transpose(1, 2)


def _follow(norm: NormState, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics towards this batch's."""
    norm.batches.add_(1)
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
    norm.running_var.lerp_(variance.to(norm.running_var.dtype), norm.momentum)


def _mapped(rows: Tensor, weight: Tensor | None) -> Tensor:
    return rows if weight is None else F.linear(rows, weight)


def _restored(rows: Tensor, count: int) -> Tensor:
    """:func:`kronattn.ops.built.restored` of rows."""
    return rows[:, :count] + rows[:, count : count + 1]


def _spread_over(d_rows: Tensor, more: int) -> Tensor:
    """The gradient of :func:`_restored`: (N, count, C) to (N, count + more, C)."""
    padded = F.pad(d_rows, (0, 0, 0, more))
    torch.sum(d_rows, dim=1, out=padded[:, d_rows.shape[1]])
    return padded
