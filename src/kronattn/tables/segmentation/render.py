"""Table 6 for readers: accuracy beside the printed, and what each head costs; and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from kronattn.present import Cell, Column, Group, Table, format_ratio, format_significant
from kronattn.tables.segmentation.candidates import HEADS
from kronattn.tables.segmentation.measurement import RESIZE, Counted, HeadCost, HeadCosts
from kronattn.tables.segmentation.printed import PRINTED, Accuracy

__all__ = ["cost_rows_to_json", "head_table", "segmentation_tables", "to_json"]

_NOTHING = "–"


def segmentation_tables(
    counted: Sequence[Counted], costs: HeadCosts, ours: Mapping[str, Accuracy], *, backbone: str
) -> list[Table]:
    """The networks with their accuracy beside what the paper prints, and the heads with their costs."""
    return [_network_table(counted, ours, backbone), head_table(costs)]


def _network_table(counted: Sequence[Counted], ours: Mapping[str, Accuracy], backbone: str) -> Table:
    sizes = list(counted[0].madd)
    columns = (
        Column("Head", numeric=False),
        Column("Accuracy"),
        Column("Mean IoU"),
        Column("Params"),
        Column("in head"),
        *(Column(f"GMAdd {size}²") for size in sizes),
    )
    # The same network with two ways to compute its attention is one row here, under the first one's name.
    labels = {head.network: head.label for head in reversed(HEADS.values())}
    rows = []
    for found in counted:
        printed, own = PRINTED[found.network], ours.get(found.network)
        rows.append(
            [
                Cell(labels[found.network]),
                _stored(None if own is None else f"{own.pixel_accuracy:.3f}", f"{printed.pixel_accuracy:.3f}"),
                _stored(None if own is None else f"{100 * own.mean_iou:.1f}", f"{100 * printed.mean_iou:.1f}"),
                Cell(f"{found.params:,}"),
                Cell(f"{found.head_params:,}"),
                *(Cell(f"{found.madd[size] / 1e9:.2f}") for size in sizes),
            ]
        )
    runs = max((accuracy.runs for accuracy in ours.values()), default=0)
    from_runs = f"the mean of {runs} runs" if runs > 1 else "one run" if runs else "a dash where we have none"
    notes = [
        f"Backbone: {backbone} at output stride {counted[0].stride}. GMAdd: 10⁹ multiply-adds for one image, in "
        f"evaluation. Grey: as printed, on PASCAL VOC 2012, pretrained on ImageNet and MS-COCO. Blue: ours, on CamVid "
        f"from random weights, with the backbone of recipes/camvid ({from_runs}). The two do not compare with each "
        "other, the rows of each do."
    ]
    return Table("Table 6: DeepLabV2 with four heads", columns, [Group("", rows)], notes)


def _stored(found: str | None, printed: str) -> Cell:
    """What a training run found, which is kept in results/, beside the printed value."""
    return Cell(_NOTHING, printed) if found is None else Cell(found, printed, tone="stored")


def head_table(costs: HeadCosts) -> Table:
    """The heads by themselves: a group for each size of image and way of running."""
    columns = (
        Column("Head", numeric=False),
        Column("GMAdd"),
        Column("MB"),
        Column("of Attn"),
        Column("of fused"),
        Column("ms"),
        Column("images/s"),
        Column("over Attn"),
        Column("over fused"),
    )
    groups = []
    for (case, work), rows in groupby(costs.rows, key=lambda row: (row.case, row.work)):
        title = case.label if work == "inference" else f"{case.label}, {work}"
        groups.append(Group(title, [_cells(row) for row in rows]))
    shapes = dict.fromkeys(f"{row.case.batch}×{row.case.channels}×{row.case.grid}²" for row in costs.rows)
    notes = [
        f"Features: {', '.join(shapes)} (batch × channels × grid).",
        "The head by itself, from features to scores at their resolution. MB: 10⁶ bytes at the peak beyond features "
        "and weights. ms: median for the batch. Attn builds its coefficient matrix, as the paper's does; fused is the "
        "same head by PyTorch's fused attention (in blocks on the CPU). GMAdd for one image.",
        *_left_out(costs),
    ]
    if any(row.head == RESIZE for row in costs.rows):
        notes.insert(2, "resize: scores to the size of the image, which follows every head.")
    return Table("What the heads cost", columns, groups, notes)


def _cells(row: HeadCost) -> list[Cell]:
    def percent(value: float | None) -> str:
        return _NOTHING if value is None else f"{value:.1%}"

    def ratio(value: float | None) -> str:
        return _NOTHING if value is None else format_ratio(value)

    return [
        Cell("resize" if row.head == RESIZE else HEADS[row.head].label),
        Cell(f"{row.madd / 1e9:.3f}" if row.madd else _NOTHING),
        Cell(format_significant(row.memory_bytes / 1e6)),
        Cell(percent(row.memory_over_attn)),
        Cell(percent(row.memory_over_fused)),
        Cell(format_significant(row.time_ms)),
        Cell(format_significant(row.images_per_second)),
        Cell(ratio(row.speedup)),
        Cell(ratio(row.speedup_over_fused)),
    ]


def _left_out(costs: HeadCosts) -> list[str]:
    found = [f"{HEADS[one.head].label} at {one.case.label}, {one.work} ({one.reason})" for one in costs.left_out]
    return [f"Left out: {', '.join(found)}."] if found else []


def cost_rows_to_json(costs: HeadCosts) -> dict[str, Any]:
    """The heads' costs as one JSON object: rows, what was left out, environment."""
    return {
        "rows": [
            {
                "head": row.head,
                "work": row.work,
                "size": row.case.size,
                "batch": row.case.batch,
                "channels": row.case.channels,
                "grid": row.case.grid,
                "madd": row.madd,
                "memory_bytes": row.memory_bytes,
                "time_ms": row.time_ms,
                "time_ms_quartiles": [row.timing.lower * 1e3, row.timing.upper * 1e3],
                "images_per_second": row.images_per_second,
                "speedup": row.speedup,
                "speedup_over_fused": row.speedup_over_fused,
                "memory_over_attn": row.memory_over_attn,
                "memory_over_fused": row.memory_over_fused,
            }
            for row in costs.rows
        ],
        "left_out": [
            {"head": one.head, "work": one.work, "size": one.case.size, "reason": one.reason} for one in costs.left_out
        ],
        "environment": costs.environment,
    }


def to_json(
    counted: Sequence[Counted], costs: HeadCosts, ours: Mapping[str, Accuracy], *, backbone: str
) -> dict[str, Any]:
    """One JSON object: the networks with their accuracies, and the heads' costs."""
    heads = cost_rows_to_json(costs)
    return {
        "backbone": backbone,
        "rows": [
            {
                "network": found.network,
                "params": found.params,
                "head_params": found.head_params,
                "madd": {str(size): madd for size, madd in found.madd.items()},
                "paper": {
                    "pixel_accuracy": PRINTED[found.network].pixel_accuracy,
                    "mean_iou": PRINTED[found.network].mean_iou,
                },
                "camvid": asdict(ours[found.network]) if found.network in ours else None,
            }
            for found in counted
        ],
        "heads": heads["rows"],
        "left_out": heads["left_out"],
        "environment": heads["environment"],
    }
