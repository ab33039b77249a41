"""NVIDIA's multi-process service, by which kernels of several processes run side by side on one GPU.

Without it the processes take turns there, and each has the whole GPU for kernels that fill a part of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from kronattn.training.recipe import Recipe

__all__ = ["sharing_gpu"]

_CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
# Where CUDA looks for a service if it is told no place.
_USUAL_PLACE = Path("/tmp/nvidia-mps/control")
# Its input ends with this process, however that ends: nobody is left with a service that was started for one command.
_STOP = f'cat > /dev/null; echo quit | {_CONTROL}; rm -rf "${_PIPES}"'
# A service may start and then serve nobody, in a container for instance: CUDA fails then rather than do without.
_TRY = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
raise SystemExit(bool(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)))
"""
_PATIENCE = 60  # seconds
# In a session of their own, where Ctrl-C does not reach them.
_APART: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}


@contextmanager
def sharing_gpu(recipes: Iterable[Recipe], processes: int) -> Iterator[None]:
    """Have processes that are started meanwhile share a GPU by a service of their own, where that is of use.

    A service that is there already serves them instead. Where none can be started, a line says so.
    """
    with ExitStack() as stack:
        if _is_of_use(recipes, processes) and not _start(stack):
            stack.close()
            failed = "NVIDIA's multi-process service could not be started"
            print(f"{failed}: the processes take turns on the GPU", file=sys.stderr, flush=True)
        yield


def _is_of_use(recipes: Iterable[Recipe], processes: int) -> bool:
    if processes < 2 or not any(one.accelerator in ("auto", "gpu", "cuda") and one.devices == 1 for one in recipes):
        return False
    if _PIPES in os.environ or _USUAL_PLACE.exists() or shutil.which(_CONTROL) is None:
        return False
    return torch.cuda.is_available()


def _start(stack: ExitStack) -> bool:
    """Start the service, until the stack is closed; whether that went well."""
    try:
        # In /tmp, wherever other temporary files go: a socket's path has a hundred characters at most.
        place = tempfile.mkdtemp(prefix="kronattn-mps-", dir="/tmp")
    except OSError:
        return False
    environment = {**os.environ, _PIPES: place, _LOGS: place}
    # The service would number those devices anew, and the processes choose among them once more.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    stop = subprocess.Popen(["sh", "-c", _STOP], stdin=subprocess.PIPE, env=environment, **_APART)
    stack.callback(_end, stop)
    if not _ends_well([_CONTROL, "-d"], environment):
        return False
    os.environ[_PIPES] = place
    stack.callback(os.environ.pop, _PIPES, None)
    return _ends_well([sys.executable, "-c", _TRY], os.environ)


def _ends_well(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    with suppress(OSError, subprocess.TimeoutExpired):
        options = {"stdin": subprocess.DEVNULL, "env": environment, "timeout": _PATIENCE, **_APART}
        return subprocess.run(command, check=False, **options).returncode == 0
    return False


def _end(stop: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        stop.communicate(timeout=_PATIENCE)
