"""Recording what every attention layer of a model attends to: what its middle stage gave, copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import SupportsIndex, overload

import torch
from torch import Tensor, nn

from kronattn.nn.grid_attention import GridAttention, Mixed
from kronattn.nn.recorded import RecordedAttention
from kronattn.ops.masks import Masks

__all__ = ["Recording", "record_coefficients"]


class Recording(list[RecordedAttention]):
    """The calls that were recorded, in the order they were made: by number, or the last one of a layer by name."""

    @property
    def names(self) -> list[str]:
        """The layers' names, each once, in the order of their first call."""
        return list(dict.fromkeys(call.name for call in self))

    @overload
    def __getitem__(self, which: SupportsIndex | str) -> RecordedAttention: ...
    @overload
    def __getitem__(self, which: slice) -> list[RecordedAttention]: ...
    def __getitem__(self, which: SupportsIndex | str | slice) -> RecordedAttention | list[RecordedAttention]:
        if not isinstance(which, str):
            return super().__getitem__(which)
        for call in reversed(self):
            if call.name == which:
                return call
        raise KeyError(f"no call of a layer {which!r} was recorded; there are {', '.join(self.names) or 'none'}")

    def __repr__(self) -> str:
        return f"Recording({super().__repr__()})"


@contextmanager
def record_coefficients(model: nn.Module) -> Iterator[Recording]:
    """Record what every attention layer of ``model`` attends to, while the model's output stays the same to the bit.

    Layers are :class:`kronattn.nn.KroneckerAttention` and :class:`kronattn.nn.DenseAttention`; each call of one adds
    a :class:`kronattn.nn.recorded.RecordedAttention`. The layers compute as ever; a recorded call keeps copies of its
    queries, keys and values, from which the coefficient matrix is materialised on first use.

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
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, GridAttention)]
    before = [layer.observer for _, layer in layers]
    try:
        for name, layer in layers:
            layer.observer = partial(_record, recording, name or type(layer).__name__)
        yield recording
    finally:
        for (_, layer), observer in zip(layers, before, strict=True):
            layer.observer = observer


def _record(
    recording: Recording, name: str, layer: GridAttention, mixed: Mixed, grid: Sequence[int], key_grid: Sequence[int]
) -> None:
    """Add a call: what :class:`kronattn.nn.grid_attention.GridAttention` tells its observer."""
    columns = (_copy(mixed.queries).flatten(2), _copy(mixed.keys).transpose(1, 2), _copy(mixed.values).transpose(1, 2))
    queries, keys, values = (x.to(columns[0].dtype) for x in columns)
    product = layer.combine == "product"
    recording.append(
        RecordedAttention(
            name,
            layer.mode,
            tuple(grid),
            tuple(key_grid),
            queries.unflatten(1, (layer.num_heads, -1)),
            keys.unflatten(1, (layer.num_heads, -1)),
            None if mixed.key_bias is None else _copy(mixed.key_bias),
            values,
            mean_once=layer.mode == "qkv" and layer.mean == "once" and not product,
            per_axis=layer.softmax == "per_axis",
            product=product,
            masks=Masks(*(None if x is None else x.clone() for x in mixed.masks)),
        )
    )


def _copy(x: Tensor) -> Tensor:
    """In float32 at least: what the model does to its own tensor later must not show here."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return x.detach().to(torch.float32 if half else x.dtype, copy=True)
