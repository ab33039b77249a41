"""Tables 3, 4 and 5 of the paper: parameters and multiply-adds of every network, recomputed beside the printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from kronattn.measure import count_madd
from kronattn.models.baselines import BASELINES
from kronattn.models.registry import create_model
from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.ops.compat import is_batch_norm
from kronattn.tables.rendering import Cell, Column, Group, Table

__all__ = ["ROWS", "Measured", "NetworkRow", "count_parameters", "measure_networks", "network_tables", "to_json"]

IMAGE = (1, 3, 224, 224)


@dataclass(frozen=True)
class Printed:
    """What the paper prints for a network: top-1 accuracy on ImageNet, parameters, multiply-adds."""

    top1: float
    params: float
    madd: float


@dataclass(frozen=True)
class NetworkRow:
    """One row of one of the paper's tables; ``note`` says why ours differs from what is printed, if it does.

    ``paper`` is None for a network that the paper does not have.
    """

    table: int
    name: str
    label: str
    build: Callable[[], nn.Module]
    paper: Printed | None
    note: str | None = None


_WITHOUT_KAO = (
    "The printed 3.46m and 298m do not follow from the paper's text: they repeat the row of MobileNetV2+KAO. "
    "Replacing all AttnSkipModules of KANet by BaseModules gives the figures on the left."
)

_MEAN_ONCE = (
    "KAO_QKV with the image's mean counted once, as the theorem asks for; the paper's equation counts it once for each "
    "axis, and the printed figures are of that network. Subtracting a mean takes no multiply-adds."
)

# What Tables 3 to 5 print for the networks of Table 1's family.
_OURS: dict[str, tuple[str, Printed | None, str | None]] = {
    "mobilenetv2": ("MobileNetV2", Printed(0.720, 3.47e6, 300e6), None),
    "kanet_kv": ("KANet_KV", Printed(0.729, 3.44e6, 288e6), None),
    "kanet_qkv": ("KANet_QKV", None, _MEAN_ONCE),
    "kanet_qkv_as_printed": ("KANet_QKV printed", Printed(0.728, 3.44e6, 281e6), None),
    "attnnet": ("AttnNet", Printed(0.730, 3.44e6, 365e6), None),
    "attnnet_pool": ("AttnNet+Pool", Printed(0.729, 3.44e6, 300e6), None),
    "mobilenetv2_kao": ("MobileNetV2+KAO", Printed(0.726, 3.46e6, 298e6), None),
    "kanet_without_kao": ("KANet w/o KAO", Printed(0.721, 3.46e6, 298e6), _WITHOUT_KAO),
}


def _ours(table: int, name: str) -> NetworkRow:
    label, printed, note = _OURS[name]
    return NetworkRow(table, name, label, partial(create_model, name), printed, note)


ROWS = (
    *(
        NetworkRow(3, b.name, b.label, b.build, Printed(b.paper_top1, b.paper_params, b.paper_madd), b.note)
        for b in BASELINES.values()
    ),
    *(_ours(3, name) for name in ("mobilenetv2", "kanet_kv", "kanet_qkv", "kanet_qkv_as_printed")),
    *(_ours(4, name) for name in ("attnnet", "attnnet_pool", "kanet_kv", "kanet_qkv", "kanet_qkv_as_printed")),
    *(_ours(5, name) for name in ("mobilenetv2", "mobilenetv2_kao", "kanet_kv", "kanet_without_kao")),
)

_TITLES = {
    3: "Table 3: KANets and other networks",
    4: "Table 4: regular attention in the same places",
    5: "Table 5: ablations",
}


@dataclass(frozen=True)
class Measured:
    """A row with what was counted: all parameters, those outside batch norm, multiply-adds for one image."""

    row: NetworkRow
    params: int
    params_without_bn: int
    madd: int


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """The number of a model's parameters: all, and those that do not belong to a batch norm.

    Example:
        >>> count_parameters(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)))
        (48, 32)
    """
    norms = (m for m in model.modules() if is_batch_norm(m) or isinstance(m, CoefficientNorm))
    in_norms = sum(parameter.numel() for norm in norms for parameter in norm.parameters(recurse=False))
    everything = sum(parameter.numel() for parameter in model.parameters())
    return everything, everything - in_norms


def measure_networks(
    rows: Sequence[NetworkRow] = ROWS,
    *,
    track: Callable[[Sequence[NetworkRow]], Iterable[NetworkRow]] = lambda rows: rows,
) -> list[Measured]:
    """Build each network and count; a network that stands in several tables is counted once.

    Nothing is computed: networks are built without memory for their weights, and shapes alone go through them.
    """
    counted: dict[str, tuple[int, int, int]] = {}
    measured = []
    for row in track(rows):
        if row.name not in counted:
            with torch.device("meta"):
                model = row.build().eval()
                madd = count_madd(model, torch.empty(IMAGE))
            counted[row.name] = (*count_parameters(model), madd)
        measured.append(Measured(row, *counted[row.name]))
    return measured


def network_tables(measured: Sequence[Measured]) -> list[Table]:
    """The three tables for readers, with the printed values beside ours and a footnote for each difference."""
    columns = (
        Column("Network", numeric=False),
        Column("Top-1 (paper)"),
        Column("Top-1 (ours)"),
        Column("Params"),
        Column("Params with BN"),
        Column("MAdd"),
    )
    tables = []
    for number, title in _TITLES.items():
        rows: list[list[Cell]] = []
        notes: list[str] = []
        for found in (found for found in measured if found.row.table == number):
            mark = ""
            if found.row.note:
                notes.append(f"[{len(notes) + 1}] {found.row.label}: {found.row.note}")
                mark = f" [{len(notes)}]"
            printed = found.row.paper
            rows.append(
                [
                    Cell(found.row.label + mark),
                    Cell(f"{printed.top1:.3f}" if printed else "–", tone="printed"),
                    Cell("–"),
                    Cell(f"{found.params_without_bn:,}", printed=_millions(printed.params) if printed else ""),
                    Cell(f"{found.params:,}"),
                    Cell(f"{found.madd:,}", printed=_millions(printed.madd) if printed else ""),
                ]
            )
        notes.append(
            "Params: without those of batch norm, as the paper counts them. MAdd: multiply-adds for one 224×224 "
            "image. Grey: as printed; the paper mostly cuts figures off rather than rounding them. Top-1 is on "
            "ImageNet; a dash where we have not trained on it."
        )
        if rows:
            tables.append(Table(title, columns, [Group("", rows)], notes))
    return tables


def to_json(measured: Sequence[Measured]) -> dict[str, Any]:
    """One JSON object with a row for each network of each table."""
    return {
        "rows": [
            {
                "table": found.row.table,
                "name": found.row.name,
                "params": found.params,
                "params_without_bn": found.params_without_bn,
                "madd": found.madd,
                "paper": None if found.row.paper is None else asdict(found.row.paper),
                "top1": None,
                "note": found.row.note,
            }
            for found in measured
        ]
    }


def _millions(value: float) -> str:
    return f"{value / 1e6:g}m"
