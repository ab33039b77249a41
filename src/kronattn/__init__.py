"""Kronecker attention for PyTorch: attention over images, video and volumes at about the price of a copy."""

from kronattn.inference import fuse
from kronattn.models import create_model, list_models
from kronattn.models.timm_hook import register_when_timm_is_imported
from kronattn.nn import record_coefficients
from kronattn.ops import attention, axis_averages, explain_plan, kronecker_attention, outer_sum, pad_batch
from kronattn.version import __version__

__all__ = [
    "__version__",
    "attention",
    "axis_averages",
    "create_model",
    "explain_plan",
    "fuse",
    "kronecker_attention",
    "list_models",
    "outer_sum",
    "pad_batch",
    "record_coefficients",
]

register_when_timm_is_imported()
