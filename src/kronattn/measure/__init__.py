"""What a computation costs: multiply-adds, memory and time, and where they were measured. Needs torch alone."""

from kronattn.measure.compare import Call, Comparison, Ratio, Row, Way, compare, memory_budget, read_comparison
from kronattn.measure.environment import describe_environment, resolve_device, resolve_dtype
from kronattn.measure.madd import count_madd, count_parameters
from kronattn.measure.memory import available_memory, peak_memory
from kronattn.measure.timing import Timing, replayed, time_calls

__all__ = [
    "Call",
    "Comparison",
    "Ratio",
    "Row",
    "Timing",
    "Way",
    "available_memory",
    "compare",
    "count_madd",
    "count_parameters",
    "describe_environment",
    "memory_budget",
    "peak_memory",
    "read_comparison",
    "replayed",
    "resolve_device",
    "resolve_dtype",
    "time_calls",
]
