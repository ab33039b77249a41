"""The heads that are compared, and the feature maps that they are run on."""

from __future__ import annotations

from dataclasses import dataclass
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

from kronattn.nn import DenseAttention, DenseSegmentationHead
from kronattn.nn.grid_attention import map_positions
from kronattn.ops import torch_backend

__all__ = ["HEADS", "Case", "Head", "MaterialisedSegmentationHead"]


@dataclass(frozen=True)
class Case:
    """The features of a batch of square images: a backbone's last, at an output stride.

    >>> Case(513).grid
    65
    """

    size: int
    batch: int = 1
    channels: int = 2048
    stride: int = 8
    num_classes: int = 21

    @property
    def grid(self) -> int:
        """The number of rows, and of columns, of the features."""
        return -(-self.size // self.stride)


class _MaterialisedAttention(DenseAttention):
    """Regular attention that materialises its coefficient matrix, as the paper's does; for one head."""

    def forward(
        self, query: Tensor, key: Tensor | None = None, value: Tensor | None = None, *, residual: Tensor | None = None
    ) -> Tensor:
        maps = (self.query_map, self.key_map, self.value_map)
        queries, keys, values = (map_positions(linear, query).flatten(2).transpose(1, 2) for linear in maps)
        moments = None
        if self.uses_batch_statistics:
            moments = torch_backend.moments(queries.transpose(1, 2), keys)
        keys, _ = self._normalised(keys, moments)
        # One row a query: the softmax runs along memory, which is the fastest of the ways to write Eq. 1.
        coefficients = torch.bmm(queries, keys.to(queries.dtype).transpose(1, 2)).softmax(dim=-1)
        return torch.bmm(coefficients, values).transpose(1, 2).unflatten(2, query.shape[2:])


class MaterialisedSegmentationHead(DenseSegmentationHead):
    """The head of ``deeplabv2_attn`` with its coefficient matrix materialised: (N, C, h, w) to (N, num_classes, h, w).

    :class:`kronattn.nn.DenseSegmentationHead` gives the same result without that matrix: by PyTorch's fused kernels on
    a GPU, block by block on the CPU.

    >>> MaterialisedSegmentationHead(16, 5)(torch.randn(2, 16, 7, 9)).shape
    torch.Size([2, 5, 7, 9])
    """

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes)
        self.attn = _MaterialisedAttention(in_channels, project="qkv", qk_channels=self.width, out_channels=self.width)


@dataclass(frozen=True)
class Head:
    """One head of the comparison; ``network`` is the network of Table 6 that has it.

    ``build`` is its class, "module:Class", and its mode where it has one: by a name that processes, and earlier source
    trees, have as well.

    >>> HEADS["kao_qkv"].module(16, 5)(torch.randn(2, 16, 7, 9)).shape
    torch.Size([2, 5, 7, 9])
    """

    label: str
    network: str
    build: str
    mode: str | None = None
    materialises: bool = False

    def module(self, in_channels: int, num_classes: int) -> nn.Module:
        return resolve_name(self.build)(in_channels, num_classes, *([self.mode] if self.mode else []))

    def bytes_needed(self, case: Case, itemsize: int, *, training: bool = False) -> int:
        """Return about what it will allocate: logits and coefficients, and their gradients in training."""
        positions = case.grid**2
        matrices = (4 if training else 2) * positions**2 if self.materialises else 0
        maps = (4 if training else 1) * 2 * positions * case.channels
        return case.batch * (matrices + maps) * itemsize


_ATTENTION = "kronattn.nn:KroneckerSegmentationHead"
_MATERIALISED = "kronattn.tables.segmentation.candidates:MaterialisedSegmentationHead"
HEADS: dict[str, Head] = {
    "aspp": Head("ASPP", "deeplabv2_aspp", "kronattn.nn:AtrousPyramidHead"),
    "attn": Head("Attn", "deeplabv2_attn", _MATERIALISED, materialises=True),
    "attn_fused": Head("fused", "deeplabv2_attn", "kronattn.nn:DenseSegmentationHead"),
    "kao_kv": Head("KAO_KV", "deeplabv2_kao_kv", _ATTENTION, "kv"),
    "kao_qkv": Head("KAO_QKV", "deeplabv2_kao_qkv", _ATTENTION, "qkv"),
}
