"""Kronecker attention for PyTorch: attention over images, video and volumes at about the price of a copy."""

from kronattn.ops import attention, axis_averages, kronecker_attention, outer_sum
from kronattn.version import __version__

__all__ = ["__version__", "attention", "axis_averages", "kronecker_attention", "outer_sum"]
