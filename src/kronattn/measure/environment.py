"""What a measurement was made with, to be kept beside it; and devices and dtypes by name."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from kronattn.ops import native
from kronattn.version import __version__

__all__ = ["describe_environment", "resolve_device", "resolve_dtype"]

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def describe_environment(
    device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, packages: Sequence[str] = ()
) -> dict[str, str | int]:
    """Return the hardware and the versions that a measurement depends on: no names of hosts, no paths.

    ``packages`` are those whose versions matter beside torch's. On a GPU Triton's does, on a CPU that of kronattn-cpu,
    where it takes part.

    Example:
        >>> sorted(describe_environment())
        ['date', 'device', 'dtype', 'kronattn', 'python', 'threads', 'torch']
    """
    device, own = torch.device(device), []
    if device.type == "cuda":
        own = ["triton"]
    elif device.type == "cpu" and native.missing_reason() is None:
        own = ["kronattn-cpu"]
    return {
        "kronattn": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "date": datetime.now(UTC).date().isoformat(),
        **{name: version(name) for name in (*packages, *own)},
    }


def resolve_device(name: str) -> torch.device:
    """Return the device of that name if this machine has it: "cpu", "cuda", with several "cuda:1", "mps"; "auto" is a
    GPU where there is one.

    Example:
        >>> resolve_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device must be auto, cpu, cuda or mps, not {name!r}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError("device 'mps' is not there: it is for Apple's GPUs")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the floating-point dtype of that name; a dtype is one already.

    Example:
        >>> resolve_dtype("bfloat16")
        torch.bfloat16
    """
    if isinstance(name, torch.dtype):
        return name
    if name not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not {name!r}")
    return _DTYPES[name]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
