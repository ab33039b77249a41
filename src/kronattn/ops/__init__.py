"""Functions: tensors in, tensors out; no parameters, no state."""

from kronattn.ops.attention import attention
from kronattn.ops.grid import axis_averages, outer_sum
from kronattn.ops.kronecker import kronecker_attention
from kronattn.ops.masks import pad_batch
from kronattn.ops.plan import explain_plan

__all__ = ["attention", "axis_averages", "explain_plan", "kronecker_attention", "outer_sum", "pad_batch"]
