"""Recording what every attention layer of a model attends to: what its middle stage gave, copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from torch import nn

from kronattn.nn.attention import KroneckerAttention
from kronattn.nn.grid_attention import GridAttention, Mixed
from kronattn.nn.recorded import RecordedAttention, wide
from kronattn.ops.masks import Masks

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
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, GridAttention)]
    before = [layer.observer for _, layer in layers]
    try:
        for name, layer in layers:
            layer.observer = _observer(name or type(layer).__name__, recording)
        yield recording
    finally:
        for (_, layer), observer in zip(layers, before, strict=True):
            layer.observer = observer


def _options(layer: GridAttention) -> dict[str, Any]:
    if not isinstance(layer, KroneckerAttention):
        return {}
    product = layer.combine == "product"
    return {
        "mean_once": layer.mode == "qkv" and layer.mean == "once" and not product,
        "per_axis": layer.softmax == "per_axis",
        "product": product,
    }


def _observer(name: str, recording: Recording) -> Callable[[GridAttention, Mixed, Sequence[int], Sequence[int]], None]:
    def observe(layer: GridAttention, mixed: Mixed, grid: Sequence[int], key_grid: Sequence[int]) -> None:
        mode = layer.mode if isinstance(layer, KroneckerAttention) else "regular"
        # Copies in float32 at least: what the model does to its own tensors later must not show here.
        columns = (wide(mixed.queries).flatten(2), wide(mixed.keys).transpose(1, 2), wide(mixed.values).transpose(1, 2))
        queries, keys, values = (x.to(columns[0].dtype) for x in columns)
        queries, keys = (x.unflatten(1, (layer.num_heads, -1)) for x in (queries, keys))
        bias = None if mixed.key_bias is None else wide(mixed.key_bias)
        masks = Masks(*(None if x is None else x.clone() for x in mixed.masks))
        grids, options = (tuple(grid), tuple(key_grid)), _options(layer)
        recording._calls.append(
            RecordedAttention(name, mode, *grids, queries, keys, bias, values, masks=masks, **options)
        )

    return observe
