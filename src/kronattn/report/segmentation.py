"""The report's section on Table 6: what segmentation heads cost."""

from __future__ import annotations

from kronattn.present import format_ratio
from kronattn.report.section import Content, Drawing, Highlight, Settings
from kronattn.tables.segmentation import (
    HEADS,
    Case,
    HeadCosts,
    count_networks,
    draw_heads,
    measure_heads,
    read_results,
    segmentation_tables,
)

__all__ = ["build"]

_BACKBONE = "resnet101"
_SIZES = (321, 513)
_QUICK_SIZES = (65, 129)
_INTRODUCTION = (
    "DeepLabV2 with its own head (ASPP: four dilated convolutions), and with regular or Kronecker attention in its "
    "place. Feature maps are large here, so this is where Kronecker attention pays most: whole networks counted, and "
    "the heads by themselves measured."
)


def build(settings: Settings) -> Content:
    """Count the networks, measure the heads."""
    sizes = _QUICK_SIZES if settings.quick else _SIZES
    counted = count_networks(sizes, backbone=_BACKBONE)
    costs = measure_heads(
        [Case(size, channels=counted[0].channels, stride=counted[0].stride) for size in sizes],
        device=settings.device,
        dtype=settings.dtype,
        seconds=0.05 if settings.quick else 3.0,
        track=lambda cases: settings.track(cases, "Measuring heads"),
    )
    drawing = Drawing(
        draw_heads(costs.rows),
        "Time of a head and its memory beyond the features, for one image, against the image's size.",
        "Time and memory of segmentation heads against the image's size: regular attention grows fastest, Kronecker "
        "attention slowest.",
    )
    tables = segmentation_tables(counted, costs, read_results(), backbone=_BACKBONE)
    return Content(_INTRODUCTION, tables, [drawing], _highlights(costs, max(sizes)))


def _highlights(costs: HeadCosts, size: int) -> list[Highlight]:
    """Kronecker attention over the regular head, computed in its fused form, at the largest size."""
    return [
        Highlight(
            format_ratio(row.speedup_over_fused),
            f"{HEADS[row.head].label} over fused attention as the head of a segmentation network at {row.case.label}",
        )
        for row in costs.rows
        if row.case.size == size and row.head.startswith("kao") and row.speedup_over_fused is not None
    ]
