"""Table 6 of the paper: segmentation with ASPP, regular and Kronecker attention; and what the heads cost."""

from kronattn.tables.segmentation.candidates import HEADS, Case, Head, MaterialisedSegmentationHead
from kronattn.tables.segmentation.heads import draw_heads, head_table, measure_heads, parse_sizes
from kronattn.tables.segmentation.networks import count_networks, network_table, to_json
from kronattn.tables.segmentation.printed import PRINTED, read_results

__all__ = [
    "HEADS",
    "PRINTED",
    "Case",
    "Head",
    "MaterialisedSegmentationHead",
    "count_networks",
    "draw_heads",
    "head_table",
    "measure_heads",
    "network_table",
    "parse_sizes",
    "read_results",
    "to_json",
]
