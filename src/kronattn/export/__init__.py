"""Networks for other runtimes: captured, checked against PyTorch, and only then written."""

from kronattn.export.capture import FORMATS, SIZES, Exported, export_network, find_network
from kronattn.export.check import LIMIT, Difference, largest_difference
from kronattn.export.rewrite import rewritten

__all__ = [
    "FORMATS",
    "LIMIT",
    "SIZES",
    "Difference",
    "Exported",
    "export_network",
    "find_network",
    "largest_difference",
    "rewritten",
]
