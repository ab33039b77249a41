"""Table 6 of the paper: segmentation with ASPP, regular and Kronecker attention; and what the heads cost."""

from kronattn.tables.segmentation.candidates import HEADS, Case, Head, MaterialisedSegmentationHead
from kronattn.tables.segmentation.figure import draw_heads
from kronattn.tables.segmentation.measurement import HeadCost, HeadCosts, count_networks, measure_heads
from kronattn.tables.segmentation.printed import PRINTED, read_results
from kronattn.tables.segmentation.render import segmentation_tables, to_json

__all__ = [
    "HEADS",
    "PRINTED",
    "Case",
    "Head",
    "HeadCost",
    "HeadCosts",
    "MaterialisedSegmentationHead",
    "count_networks",
    "draw_heads",
    "measure_heads",
    "read_results",
    "segmentation_tables",
    "to_json",
]
