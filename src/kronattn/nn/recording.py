"""Recording the coefficients of every attention layer of a model, beside the computation and never inside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, overload

import torch
from torch import Tensor, nn

from kronattn.nn.attention import DenseAttention, KroneckerAttention
from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.nn.grid_attention import GridAttention, map_channels, weight_of
from kronattn.nn.recorded import RecordedAttention, wide
from kronattn.ops.attention import pool_grid
from kronattn.ops.autocast import without_autocast
from kronattn.ops.coefficients import coefficient_moments
from kronattn.ops.grid import wide_averages

__all__ = ["Recording", "record_coefficients"]


class Recording(Sequence[RecordedAttention]):
    """The calls that were recorded, in the order they were made: by number, or the last one of a layer by name."""

    def __init__(self) -> None:
        self._calls: list[RecordedAttention] = []

    @property
    def names(self) -> list[str]:
        """The layers' names, each once, in the order of their first call."""
        return list(dict.fromkeys(call.name for call in self._calls))

    def clear(self) -> None:
        """Forget what was recorded so far."""
        self._calls.clear()

    @overload
    def __getitem__(self, which: int | str) -> RecordedAttention: ...
    @overload
    def __getitem__(self, which: slice) -> Sequence[RecordedAttention]: ...
    def __getitem__(self, which: int | str | slice) -> RecordedAttention | Sequence[RecordedAttention]:
        if not isinstance(which, str):
            return self._calls[which]
        for call in reversed(self._calls):
            if call.name == which:
                return call
        raise KeyError(f"no call of a layer {which!r} was recorded; there are {', '.join(self.names) or 'none'}")

    def __len__(self) -> int:
        return len(self._calls)

    def __repr__(self) -> str:
        return f"Recording({self._calls!r})"


@contextmanager
def record_coefficients(model: nn.Module) -> Iterator[Recording]:
    """Record what every attention layer of ``model`` attends to, while the model's output stays the same to the bit.

    Layers are :class:`kronattn.nn.KroneckerAttention` and :class:`kronattn.nn.DenseAttention`; each call of one adds
    a :class:`kronattn.nn.recorded.RecordedAttention`. The layers compute as ever; a recorded call keeps copies of its
    queries, keys and values and builds the coefficient matrix when it is asked for.

    Args:
        model: any module that holds attention layers, or such a layer itself. Not one that ``torch.compile`` gave,
            which runs past what records.

    Yields:
        A :class:`Recording`: a sequence that also takes a layer's name.

    Example:
        >>> import kronattn
        >>> model = kronattn.create_model("kanet_qkv", num_classes=10, width=0.25).eval()
        >>> with kronattn.record_coefficients(model) as recorded:
        ...     logits = model(torch.randn(1, 3, 64, 96))
        >>> len(recorded), recorded[0]
        (10, RecordedAttention('stages.3.0.attn', mode='qkv', grid=(8, 12), num_heads=1))
        >>> recorded["stages.3.0.attn"].coefficients.sum(dim=-2).allclose(torch.ones(()))
        True
    """
    if hasattr(model, "_orig_mod"):
        raise ValueError("a compiled model runs past the recorder: give the model that was compiled")
    recording = Recording()
    with ExitStack() as hooks:
        for name, layer in model.named_modules():
            if isinstance(layer, GridAttention):
                recorder = _Recorder(name or type(layer).__name__, recording)
                if layer.norm is not None and layer.norm._shares_statistics():
                    hooks.callback(layer.norm.register_forward_hook(recorder.keep_norm).remove)
                hooks.callback(layer.register_forward_hook(recorder.record, with_kwargs=True).remove)
        yield recording


class _Recorder:
    """Listens to one layer and, where statistics are shared among processes, to its norm: they are known nowhere else.

    Otherwise the norm is left alone: a backend that computes a whole layer at once steps aside for a norm that
    somebody listens to, and would round differently.
    """

    def __init__(self, name: str, recording: Recording) -> None:
        self.name = name
        self.recording = recording
        self.norm: tuple[Tensor, Tensor | None] | None = None

    def keep_norm(self, module: nn.Module, arguments: Any, output: tuple[Tensor, Tensor | None]) -> None:
        self.norm = output

    def record(self, layer: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Tensor) -> None:
        given = {**dict(zip(("query", "key", "value"), arguments, strict=False)), **options}
        with torch.no_grad():
            # What the layer saw, in autocast's dtype where that is on; products of it are taken in full precision.
            seen = layer._checked(*(given.get(name) for name in ("query", "key", "value")))
            with without_autocast(seen[0]):
                call = self._recorded(layer, *(wide(x) for x in seen))
                if given.get("read_out") is not None:
                    call.read_out = wide(given["read_out"]).to(call.values.dtype)
                self.recording._calls.append(call)
        self.norm = None

    def _recorded(self, layer: GridAttention, query: Tensor, key: Tensor, value: Tensor) -> RecordedAttention:
        grid, key_grid = query.shape[2:], key.shape[2:]
        if isinstance(layer, KroneckerAttention):
            mode = layer.mode
            query = wide_averages(query) if mode == "qkv" else query.flatten(2)
            key, value = wide_averages(key), wide_averages(value)
        elif isinstance(layer, DenseAttention):
            mode = "regular"
            if layer.pool is not None:
                key, value = pool_grid(key, layer.pool), pool_grid(value, layer.pool)
                key_grid = key.shape[2:]
            query, key, value = query.flatten(2), key.flatten(2), value.flatten(2)
        else:
            raise TypeError(f"{type(layer).__name__} is an attention layer that the recorder does not know")
        heads = (layer.num_heads, -1)
        queries = map_channels(query, weight_of(layer.query_map)).unflatten(1, heads)
        keys = map_channels(key, weight_of(layer.key_map)).unflatten(1, heads) * layer.scale
        values, bias = map_channels(value, weight_of(layer.value_map)), None
        if layer.norm is not None:
            scale, bias = _scale_and_bias(layer.norm, queries, keys) if self.norm is None else self.norm
            keys = keys * scale
        return RecordedAttention(self.name, mode, grid, key_grid, queries, keys, bias, values)


def _scale_and_bias(norm: CoefficientNorm, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None]:
    """What the norm multiplies the keys by and adds to their coefficients; its running statistics stay as they are."""
    if not (norm.uses_batch_statistics and len(queries)):
        return norm.forward(queries, keys)
    moments = coefficient_moments(queries, keys, per_key=norm.num_keys is not None)
    scale = torch.rsqrt(moments.squares.flatten() / moments.members + norm.bn.eps)
    if norm.bn.weight is not None:
        scale = scale * norm.bn.weight
    if norm.num_keys is None:
        return scale.view(-1, 1, 1), None
    bias = -moments.mean.flatten() * scale
    if norm.bn.bias is not None:
        bias = bias + norm.bn.bias
    return scale.view(norm.num_heads, 1, -1), bias.view(norm.num_heads, -1)
