"""Each attention layer of a network with its own operator and, on the same features, with the other two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.nn import DenseAttention, KroneckerAttention, record_coefficients
from kronattn.nn.grid_attention import GridAttention
from kronattn.nn.recorded import RecordedAttention

__all__ = ["LABELS", "MODES", "Comparison", "compare_operators", "look"]

MODES = ("kv", "qkv", "regular")
_SEEN = ("query", "key", "value")
_MASKS = ("mask", "key_mask")
LABELS = {"kv": "KAO_KV", "qkv": "KAO_QKV", "regular": "regular"}
# Regular attention on a segmenter's whole image takes seconds and gigabytes from here on.
MOST_POSITIONS = 8192


@dataclass(frozen=True)
class Comparison:
    """One layer: what it attends to with each operator, and which of them is the network's own.

    The regular operator is left out of ``calls`` where it is not the network's own and the grid has too many positions,
    or one alone.
    """

    name: str
    own: str
    calls: Mapping[str, RecordedAttention]

    @property
    def grid(self) -> tuple[int, ...]:
        """The layer's grid of positions."""
        return self.calls[self.own].grid


def compare_operators(model: nn.Module, images: Tensor) -> list[Comparison]:
    """What each attention layer attends to, with its own operator and with the two others.

    The others get what the layer got: the same features and the same linear maps. Only the batch norm of their
    coefficients takes this batch's statistics, since they were never trained here. The regular operator knows neither
    positions nor masks.

    Args:
        model: in evaluation mode; its state does not change.
        images: (N, channels, height, width).

    Returns:
        A :class:`Comparison` for each call of a layer, in the order they were made.

    Example:
        >>> import kronattn
        >>> model = kronattn.create_model("kanet_kv", width=0.25).eval()
        >>> comparisons = compare_operators(model, torch.randn(1, 3, 64, 64))
        >>> comparisons[0].own, list(comparisons[0].calls), comparisons[0].calls["regular"].at(3, 3).map.shape
        ('kv', ['kv', 'qkv', 'regular'], torch.Size([1, 1, 8, 8]))
    """
    return look(model, images)[1]


def look(model: nn.Module, images: Tensor) -> tuple[Tensor, list[Comparison]]:
    """The network's output, and from the same forward pass what :func:`compare_operators` gives."""
    with torch.no_grad():
        with _inputs_of_layers(model) as inputs:
            output = model(images)
        return output, [_compare(name, layer, arguments) for name, layer, arguments in inputs]


@contextmanager
def _inputs_of_layers(model: nn.Module) -> Iterator[list[tuple[str, GridAttention, dict[str, Tensor]]]]:
    found: list[tuple[str, GridAttention, dict[str, Tensor]]] = []

    def keep(name: str) -> Any:
        def hook(layer: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            given = {**dict(zip(_SEEN, arguments, strict=False)), **options}
            # What becomes of the output is nothing that attention looks at.
            seen = {k: x.clone() for k, x in given.items() if k in (*_SEEN, *_MASKS) and x is not None}
            found.append((name, layer, seen))

        return hook

    with ExitStack() as hooks:
        for name, layer in model.named_modules():
            if isinstance(layer, GridAttention):
                handle = layer.register_forward_pre_hook(keep(name or type(layer).__name__), with_kwargs=True)
                hooks.callback(handle.remove)
        yield found


def _compare(name: str, layer: GridAttention, arguments: dict[str, Tensor]) -> Comparison:
    own = layer.mode
    calls = {}
    for mode in MODES:
        # A single position has a single coefficient, of which no batch norm can take statistics.
        if mode == "regular" != own and not 1 < math.prod(arguments["query"].shape[2:]) <= MOST_POSITIONS:
            continue
        attention = layer if mode == own else _with_operator(layer, mode)
        known = arguments if mode != "regular" else {k: x for k, x in arguments.items() if k in _SEEN}
        with record_coefficients(attention) as recorded:
            attention(**known)
        calls[mode] = recorded[0]
    return Comparison(name, own, calls)


def _with_operator(layer: GridAttention, mode: str) -> GridAttention:
    """A layer of another operator with this one's maps, and batch statistics where there is a norm."""
    options: dict[str, Any] = {
        "num_heads": layer.num_heads,
        "project": layer.project,
        "coefficient_norm": "batch" if layer.coefficient_norm == "batch_per_key" else layer.coefficient_norm,
        "scale": layer.scale,
        "qk_channels": layer.qk_channels,
        "out_channels": layer.out_channels,
    }
    other = (
        DenseAttention(layer.channels, **options)
        if mode == "regular"
        else KroneckerAttention(layer.channels, mode, **options)
    )
    if isinstance(layer, KroneckerAttention) and isinstance(other, KroneckerAttention):
        other.softmax, other.positions = layer.softmax, layer.positions
    other.query_map, other.key_map, other.value_map = layer.query_map, layer.key_map, layer.value_map
    if other.norm is not None and layer.norm is not None:
        # With a norm for each key there is no one scale to take over; their mean is the nearest thing.
        scales = layer.norm.weight.detach().view(layer.num_heads, -1).mean(dim=1)
        other.norm.weight = nn.Parameter(scales)
        other.norm.to(scales.device)
    # The maps are shared with the layer and have no training mode; the norm is its own.
    other.eval()
    if other.norm is not None:
        other.norm.train()
    return other
