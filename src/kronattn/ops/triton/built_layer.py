"""A self-attention layer over an image with its coefficients built, and its gradient by hand.

PyTorch could find the gradient of :mod:`kronattn.ops.built` by itself. But these are many operators on small tensors,
which take a GPU less time than it takes to ask for them: here there are half as many, without autograd's own work
for each. And the features, by far the largest tensor, are read once for all of their products, and their gradient is
written once and added to in place: also where classes are read off the features beside the attention's output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kronattn.ops import built
from kronattn.ops.attend import at_least_float32
from kronattn.ops.autocast import without_autocast
from kronattn.ops.coefficients import NormState
from kronattn.ops.gpu import aligned
from kronattn.ops.grid import spread, wide_averages
from kronattn.ops.triton.averages import averages_forward
from kronattn.ops.triton.built import weights_backward, weights_forward
from kronattn.ops.triton.operators import seen_by_others
from kronattn.ops.triton.outer import outer_sum_forward
from kronattn.ops.triton.rows import centre, padded_pixels, padded_rows, uncentre
from kronattn.ops.triton.rules import most_built_keys

__all__ = ["self_attention"]


class _Given(NamedTuple):
    x: Tensor
    query_weight: Tensor | None
    key_weight: Tensor | None
    value_weight: Tensor | None
    read_out: Tensor | None
    skip_weight: Tensor | None
    skip_bias: Tensor | None
    gain: Tensor | None


class _Kept(NamedTuple):
    """What the backward needs: n keys and more rows are ``room``, the output's channels and more are ``width``.

    rows (N, room, C); keys (N·room, d); the whole map of the values (width, C); values (N, room, width); queries
    (N, m, d); what they are multiplied with, (N, columns, d); E and its weights; the scale; and the maps in x's dtype.
    """

    rows: Tensor
    keys: Tensor
    value_map: Tensor | None
    values: Tensor
    queries: Tensor
    asked: Tensor
    matrix: Tensor
    weights: Tensor
    norm: Tensor | None
    skip_map: Tensor | None
    query_weight: Tensor | None
    key_weight: Tensor | None
    value_weight: Tensor | None
    read_out: Tensor | None


class _Settings(NamedTuple):
    mode: str
    norm: NormState | None


def self_attention(
    x: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    value_weight: Tensor | None,
    norm: NormState | None,
    *,
    mode: str,
    read_out: Tensor | None = None,
    skip_weight: Tensor | None = None,
    skip_bias: Tensor | None = None,
) -> Tensor | None:
    """Kronecker attention of (N, C, h, w) to itself, one head, with maps and the norm of the coefficients.

    Args:
        query_weight: (d, C). In mode "kv" it goes into the keys.
        key_weight: (d, C).
        value_weight: (p, C).
        norm: takes this batch's statistics, and its running ones follow them; or takes the running ones.
        read_out: (K, p, ...), a map of the output that is taken of the values.
        skip_weight, skip_bias: (K, C, ...) and (K,), a map of x that is added to what is read out.

    Returns:
        (N, p or K, h, w) in x's dtype; None where there are more keys than the kernels hold at once, or where something
        watches the operators that run.
    """
    if seen_by_others() or x.shape[2] + x.shape[3] > most_built_keys():
        return None
    gain = None if norm is None else norm.gain
    given = _Given(x, query_weight, key_weight, value_weight, read_out, skip_weight, skip_bias, gain)
    settings = _Settings(mode, norm)
    return _SelfAttention.apply(*given, settings) if torch.is_grad_enabled() else _forward(given, settings)[0]


class _SelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, settings = args
        given = _Given(*tensors)
        output, kept = _forward(given, settings)
        ctx.save_for_backward(*given, *kept)
        ctx.settings = settings
        return output

    @staticmethod
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        given, kept = _Given(*saved[: len(_Given._fields)]), _Kept(*saved[len(_Given._fields) :])
        with without_autocast(d_output):
            if torch.is_grad_enabled():
                return *_gradients_again(given, ctx.settings, d_output), None
            return *_gradients(given, kept, ctx.settings, d_output, ctx.needs_input_grad), None


def _forward(given: _Given, settings: _Settings) -> tuple[Tensor, _Kept]:
    mode, norm = settings
    x = given.x
    batch, channels, height, width = x.shape
    count, dtype = height + width, x.dtype
    maps = [None if weight is None else weight.to(dtype) for weight in given[1:5]]
    query_weight, key_weight, value_weight, read_out = maps
    rows = centre(averages_forward(x, height, width, dtype=torch.float32), dtype)
    room = rows.shape[1]
    flat = rows.view(-1, channels)
    value_map = _value_map(value_weight, read_out)
    keys, values = _mapped(flat, key_weight), _mapped(flat, value_map)
    skip_map = None
    if mode == "kv":
        queries = x.flatten(2).transpose(1, 2)
        asked = _asked(keys.view(batch, room, -1), query_weight, given.skip_weight)
    else:
        # Of rows and columns there are so few that their coefficients need not be rounded.
        queries = uncentre(_mapped(flat, query_weight).view(batch, room, -1), count)
        asked, values = keys.float().view(batch, room, -1), values.float()
    values = values.view(batch, room, -1)
    matrix = torch.bmm(queries, asked.transpose(1, 2))
    skipped = 0 if given.skip_weight is None or mode == "qkv" else given.skip_weight.shape[0]
    weights, scale, output = weights_forward(
        matrix, count, *_statistics(given.gain, norm), bias=given.skip_bias if skipped else None, classes=skipped
    )
    outputs = _outputs(given)
    if mode == "kv":
        output = torch.bmm(weights, values) if output is None else output.baddbmm_(weights, values)
        output = _as_grid(output, outputs, height, width)
    else:
        if given.skip_weight is not None:
            skip_map = padded_rows(given.skip_weight, 1, 0, dtype).expand(batch, -1, -1)
            skip = torch.bmm(x.flatten(2).transpose(1, 2), skip_map.transpose(1, 2))
            output = _as_grid(skip, skip.shape[2], height, width)
            if given.skip_bias is not None:
                # Every position gets what its column received and what its row did: half of it from each.
                values[:, count, :outputs].add_(given.skip_bias, alpha=0.5)
        output = outer_sum_forward(torch.bmm(weights, values), x, height, width, added=output, output=output)
        output = output if output.shape[1] == outputs else output[:, :outputs]
    # As data it is not a view, which could not be modified in place by the caller.
    return output.data, _Kept(rows, keys, value_map, values, queries, asked, matrix, weights, scale, skip_map, *maps)


def _gradients(
    given: _Given, kept: _Kept, settings: _Settings, d_output: Tensor, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    for_x, for_query, for_key, for_value, for_read_out, for_skip, for_bias = wanted[:7]
    x, dtype, mode = given.x, given.x.dtype, settings.mode
    batch, channels, height, width = x.shape
    count, room, outputs = height + width, kept.rows.shape[1], d_output.shape[1]
    d_pixels = received = _as_pixels(d_output, kept.values.shape[2])
    if mode == "qkv":
        pixels = _as_grid(d_pixels, d_pixels.shape[2], height, width)
        received = averages_forward(pixels, height, width, dtype=torch.float32, mean=False)
    d_values = torch.bmm(kept.weights.transpose(1, 2), received)
    d_weights = torch.bmm(received, kept.values.transpose(1, 2))
    d_matrix, d_gain = weights_backward(
        kept.matrix,
        kept.weights,
        d_weights,
        d_pixels if mode == "kv" and given.skip_weight is not None else None,
        kept.norm,
        given.gain,
        count,
        settings.norm is not None and settings.norm.of_the_batch,
    )
    d_asked = torch.bmm(d_matrix.transpose(1, 2), kept.queries)

    # What is yet to be summed over samples and positions: (N, outputs or more, C) and (N, any, outputs or more).
    d_x = d_queries = d_skip = None
    if mode == "qkv":
        d_queries = centre(torch.bmm(d_matrix, kept.asked), dtype, True).view(batch * room, -1)
        d_bias = received[:, :width]
        if kept.skip_map is not None:
            d_x = _of_features(d_pixels, kept.skip_map, x) if for_x else None
            d_skip = torch.bmm(d_pixels.transpose(1, 2), x.flatten(2).transpose(1, 2)) if for_skip else None
    else:
        d_bias = d_values[:, count : count + 1]
        d_x = _of_features(d_matrix, kept.asked, x) if for_x else None
        if given.skip_weight is not None:
            d_asked, d_skip = d_asked[:, :room], d_asked[:, room:]
    d_skip_weight = d_skip_bias = None
    if given.skip_weight is not None and d_skip is not None and for_skip:
        d_skip_weight = d_skip[:, :outputs].sum(dim=0, dtype=given.skip_weight.dtype).view(given.skip_weight.shape)
    if given.skip_bias is not None and for_bias:
        d_skip_bias = d_bias[..., :outputs].sum(dim=(0, 1), dtype=given.skip_bias.dtype)

    flat = kept.rows.view(batch * room, channels)
    d_keys = d_asked.to(dtype).reshape(batch * room, -1)
    d_values = d_values.to(dtype).view(batch * room, -1)
    d_query_weight = None
    if d_queries is not None:
        d_query_weight = torch.mm(d_queries.t(), flat) if for_query else None
    elif kept.query_weight is not None:
        d_query_weight = torch.mm(kept.keys.t(), d_keys) if for_query else None
        d_keys = torch.mm(d_keys, kept.query_weight.t())
    d_key_weight = torch.mm(d_keys.t(), flat) if for_key else None
    d_value_weight = d_read_out = None
    if for_value or for_read_out:
        d_map = torch.mm(d_values.t(), flat)
        d_value_weight, d_read_out = _of_value_map(d_map if len(d_map) == outputs else d_map[:outputs], kept)
    if for_x:
        pieces = [(d_keys, kept.key_weight), (d_values, kept.value_map)]
        if d_queries is not None:
            pieces.append((d_queries, kept.query_weight))
        d_averages = uncentre(_of_rows(pieces).view(batch, room, channels), count, True)
        d_x = outer_sum_forward(
            d_averages, x, height, width, column_scale=1 / height, row_scale=1 / width, added=d_x, output=d_x
        )
    found = [d_x, d_query_weight, d_key_weight, d_value_weight, d_read_out, d_skip_weight, d_skip_bias, d_gain]
    return [None if d is None or of is None else d.to(of.dtype) for d, of in zip(found, given, strict=True)]


def _statistics(
    gain: Tensor | None, norm: NormState | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, float, float, bool]:
    if norm is None:
        return None, None, None, None, 0.0, 0.0, False
    return gain, norm.running_mean, norm.running_var, norm.batches, norm.momentum, norm.eps, norm.of_the_batch


def _value_map(weight: Tensor | None, read_out: Tensor | None) -> Tensor | None:
    """The map of the values with what is read out of them, in eights of rows: (width, C)."""
    if weight is None or read_out is None:
        only = weight if read_out is None else read_out
        if only is None:
            return None
        return only.flatten(1) if only.shape[0] % 8 == 0 else padded_rows(only, 1, 0, only.dtype)[0]
    outputs, room = read_out.shape[0], aligned(read_out.shape[0])
    if outputs == room:
        return torch.mm(read_out.flatten(1), weight)
    product = weight.new_zeros(room, weight.shape[1])
    torch.mm(read_out.flatten(1), weight, out=product[:outputs])
    return product


def _of_value_map(d_map: Tensor, kept: _Kept) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the values' own map and of what is read out, from that of both in one."""
    weight, read_out = kept.value_weight, kept.read_out
    if weight is None or read_out is None:
        return (d_map, None) if read_out is None else (None, d_map.view(read_out.shape))
    return torch.mm(read_out.flatten(1).t(), d_map), torch.mm(d_map, weight.t()).view(read_out.shape)


def _asked(keys: Tensor, query_weight: Tensor | None, skip_weight: Tensor | None) -> Tensor:
    """(N, room, d) keys as what features are multiplied with, and below them whatever else is: (N, columns, C)."""
    batch, room, _ = keys.shape
    if skip_weight is None:
        return keys if query_weight is None else torch.mm(keys.flatten(0, 1), query_weight).view(batch, room, -1)
    asked = padded_rows(skip_weight, batch, room, keys.dtype)
    if query_weight is None:
        asked[:, :room].copy_(keys)
    else:
        torch.bmm(keys, query_weight.expand(batch, -1, -1), out=asked[:, :room])
    return asked


def _of_features(d_products: Tensor, multiplied: Tensor, x: Tensor) -> Tensor:
    """The gradient of (N, C, h, w) from that of (N, h·w, columns) products with (N, columns, C), in x's layout."""
    if x.stride(1) == 1:
        return _as_grid(torch.bmm(d_products, multiplied), *x.shape[1:])
    return torch.bmm(multiplied.transpose(1, 2), d_products.transpose(1, 2)).view(x.shape)


def _of_rows(pieces: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    """What rows receive from the gradients of all their maps."""
    total: Tensor | None = None
    for d, weight in pieces:
        if weight is not None:
            total = torch.mm(d, weight) if total is None else total.addmm_(d, weight)
    for d, weight in pieces:
        if weight is None:
            total = d if total is None else total + d
    assert total is not None
    return total


def _as_grid(pixels: Tensor, channels: int, height: int, width: int) -> Tensor:
    """The first channels of (N, h·w, any) rows, contiguous, as an image."""
    batch, positions, room = pixels.shape
    return pixels.as_strided((batch, channels, height, width), (positions * room, 1, width * room, room))


def _as_pixels(x: Tensor, room: int) -> Tensor:
    """An image as rows, with zeros after its channels: (N, h·w, room)."""
    batch, channels, height, width = x.shape
    if channels != room or not x.is_contiguous(memory_format=torch.channels_last):
        return padded_pixels(x, room)
    return x.as_strided((batch, height * width, room), (height * width * room, room, 1))


def _mapped(rows: Tensor, weight: Tensor | None) -> Tensor:
    return rows if weight is None else torch.mm(rows, weight.t())


def _outputs(given: _Given) -> int:
    for weight in (given.read_out, given.value_weight):
        if weight is not None:
            return weight.shape[0]
    return given.x.shape[1]


def _gradients_again(given: _Given, settings: _Settings, d_output: Tensor) -> list[Tensor | None]:
    """The same by autograd, so that they can be differentiated themselves."""
    leaves: list[Any] = [x if x is None or x.requires_grad else x.detach().requires_grad_() for x in given]
    wanted = [x for x in leaves if x is not None]
    gradients = iter(torch.autograd.grad(_plain(_Given(*leaves), settings), wanted, d_output, create_graph=True))
    return [None if x is None else next(gradients) for x in leaves]


def _plain(given: _Given, settings: _Settings) -> Tensor:
    mode, norm = settings
    x, grid = given.x, given.x.shape[2:]
    count = sum(grid)
    columns = built.deviations(wide_averages(x)).to(x.dtype)

    def mapped(columns: Tensor, weight: Tensor | None) -> Tensor:
        columns = at_least_float32(columns)
        return columns if weight is None else weight.flatten(1).to(columns.dtype) @ columns

    keys = mapped(columns, given.key_weight)
    values = built.restored(mapped(mapped(columns, given.value_weight), given.read_out), count)
    if mode == "qkv":
        queries = built.restored(mapped(columns, given.query_weight), count)
    else:
        queries = mapped(x.flatten(2), None)
        keys = keys if given.query_weight is None else mapped(keys, given.query_weight.t())
    apart, shared = built.coefficients(queries, keys, count)
    scale = None
    if norm is not None and given.gain is not None:
        if norm.of_the_batch:
            members, _, squares = built.built_moments(apart, shared)
            variance = squares / members
        else:
            variance = at_least_float32(norm.running_var)
        scale = given.gain * torch.rsqrt(variance + norm.eps)
    output = built.attend(apart, values, scale)
    output = spread(output, grid) if mode == "qkv" else output.unflatten(2, grid)
    if given.skip_weight is not None:
        output = output + mapped(x.flatten(2), given.skip_weight).unflatten(2, grid)
        if given.skip_bias is not None:
            output = output + given.skip_bias[:, None, None]
    return output.to(x.dtype)
