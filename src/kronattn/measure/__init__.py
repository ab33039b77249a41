"""What a computation costs: multiply-adds, memory and time, and where they were measured. Needs torch alone."""

from kronattn.measure.environment import describe_environment, resolve_device, resolve_dtype
from kronattn.measure.madd import count_madd
from kronattn.measure.memory import available_memory, peak_memory
from kronattn.measure.timing import Timing, time_calls

__all__ = [
    "Timing",
    "available_memory",
    "count_madd",
    "describe_environment",
    "peak_memory",
    "resolve_device",
    "resolve_dtype",
    "time_calls",
]
