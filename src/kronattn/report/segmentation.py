"""The report's section on Table 6: what segmentation heads cost."""

from __future__ import annotations

from kronattn.measure import Comparison
from kronattn.present import format_ratio
from kronattn.report.section import Content, Drawing, Highlight, Settings
from kronattn.tables.segmentation.candidates import HEADS, Case
from kronattn.tables.segmentation.heads import draw_heads, head_table, measure_heads
from kronattn.tables.segmentation.networks import count_networks, network_table
from kronattn.tables.segmentation.printed import read_results

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
    found = measure_heads(
        [Case(size, channels=counted[0].channels, stride=counted[0].stride) for size in sizes],
        device=settings.device,
        dtype=settings.dtype,
        seconds=0.05 if settings.quick else 3.0,
        track=lambda cases: settings.track(cases, "Measuring heads"),
    )
    drawing = Drawing(
        draw_heads(found),
        "Time of a head and its memory beyond the features, for one image, against the image's size.",
        "Time and memory of segmentation heads against the image's size: regular attention grows fastest, Kronecker "
        "attention slowest.",
    )
    tables = [network_table(counted, read_results(), backbone=_BACKBONE), head_table(found)]
    return Content(_INTRODUCTION, tables, [drawing], _highlights(found, max(sizes)))


def _highlights(found: Comparison, size: int) -> list[Highlight]:
    """Kronecker attention over the regular head, computed in its fused form, at the largest size."""
    return [
        Highlight(
            format_ratio(ratio.value),
            f"{HEADS[row.candidate].label} over fused attention as the head of a segmentation network at {size}²",
        )
        for row in found.measured
        if row.case["size"] == size and row.candidate.startswith("kao")
        if (ratio := found.ratio(row, "attn_fused")) is not None
    ]
