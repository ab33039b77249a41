"""Tables 3, 4 and 5 of the paper: parameters and multiply-adds of every network, recomputed beside the printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from kronattn.measure import count_madd, count_parameters
from kronattn.models.baselines import BASELINES
from kronattn.models.registry import create_model
from kronattn.present import Cell, Column, Table, tabulate

__all__ = ["ROWS", "Measured", "NetworkRow", "from_json", "measure_networks", "network_tables", "to_json"]

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


def measure_networks(track: Callable[[Sequence[NetworkRow]], Iterable[NetworkRow]] = iter) -> list[Measured]:
    """Build each network and count; a network that stands in several tables is counted once.

    Nothing is computed: networks are built without memory for their weights, and shapes alone go through them.
    """
    counted: dict[str, tuple[int, int, int]] = {}
    measured = []
    for row in track(ROWS):
        if row.name not in counted:
            with torch.device("meta"):
                model = row.build().eval()
                madd = count_madd(model, torch.empty(IMAGE))
            counted[row.name] = (*count_parameters(model), madd)
        measured.append(Measured(row, *counted[row.name]))
    return measured


def network_tables(measured: Sequence[Measured]) -> list[Table]:
    """The three tables for readers, with the printed values beside ours and a footnote for each difference."""
    tables = []
    for number, title in _TITLES.items():
        rows = [found for found in measured if found.row.table == number]
        noted = [found.row for found in rows if found.row.note]

        def label(found: Measured, noted: Sequence[NetworkRow] = noted) -> str:
            return found.row.label + (f" [{noted.index(found.row) + 1}]" if found.row.note else "")

        notes = [f"[{at}] {row.label}: {row.note}" for at, row in enumerate(noted, 1)]
        notes.append(
            "Params: without those of batch norm, as the paper counts them. MAdd: multiply-adds for one 224×224 "
            "image. Grey: as printed; the paper mostly cuts figures off rather than rounding them. Top-1 is on "
            "ImageNet, which we have not trained on."
        )
        columns: dict[str | Column, Callable[[Measured], Cell | str]] = {
            "Network": label,
            "Top-1 (paper)": lambda found: Cell(
                f"{found.row.paper.top1:.3f}" if found.row.paper else "–", tone="printed"
            ),
            "Params": lambda found: Cell(f"{found.params_without_bn:,}", _printed(found, "params")),
            "Params with BN": lambda found: f"{found.params:,}",
            "MAdd": lambda found: Cell(f"{found.madd:,}", _printed(found, "madd")),
        }
        if rows:
            tables.append(tabulate(title, columns, rows, notes=notes))
    return tables


_COUNTED = ("params", "params_without_bn", "madd")


def to_json(measured: Sequence[Measured]) -> dict[str, Any]:
    """One JSON object with a row for each network of each table."""
    return {
        "rows": [
            {
                "table": found.row.table,
                "name": found.row.name,
                **{name: getattr(found, name) for name in _COUNTED},
                "paper": None if found.row.paper is None else asdict(found.row.paper),
                "top1": None,
                "note": found.row.note,
            }
            for found in measured
        ]
    }


def from_json(found: Mapping[str, Any]) -> list[Measured]:
    """What :func:`to_json` was given.

    >>> from_json({"rows": []})
    []
    """
    rows = {(row.table, row.name): row for row in ROWS}
    return [Measured(rows[one["table"], one["name"]], *(one[name] for name in _COUNTED)) for one in found["rows"]]


def _printed(found: Measured, figure: str) -> str:
    if found.row.paper is None:
        return ""
    return f"{getattr(found.row.paper, figure) / 1e6:g}m"
