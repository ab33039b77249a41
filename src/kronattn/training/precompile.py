"""Have a network's kernels compiled in processes of their own, while the run is still importing and decoding.

Triton compiles a kernel when it is first launched, one after the other: on an NVIDIA H200 a network that nobody has
trained there took 50 s over its first steps. What these processes (:mod:`kronattn.training.precompile_worker`) compile
lies in Triton's cache, where the run's own process finds it. Lightning takes as long to import as a kernel to compile:
neither this module nor theirs imports it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kronattn.data.transforms import ImageSettings
from kronattn.training.compiling import graphs_unsupported_reason, keep_compiled_code
from kronattn.training.precompile_worker import marker
from kronattn.training.recipe import Recipe

__all__ = ["precompiling"]

# More would wait for each other's imports and for the compiler's.
_PROCESSES = 6
# Bytes on the GPU: each of them holds its libraries there, and a few activations.
_ROOM = 24 * 2**30


@contextmanager
def precompiling(*recipes: Recipe, jobs: int = 1) -> Iterator[None]:
    """Have the kernels of the recipes' networks compiled in the background, where their steps will run on a GPU.

    Args:
        recipes: one for each network.
        jobs: processes that will train meanwhile; the other cores compile.
    """
    for recipe in recipes:
        if recipe.cache is not None:
            keep_compiled_code(Path(recipe.cache))
    share = min(_PROCESSES, _free_cores(jobs) // max(1, len(recipes)))
    processes = [process for recipe in recipes if _is_of_use(recipe, share) for process in _start(recipe, share)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _is_of_use(recipe: Recipe, processes: int) -> bool:
    if recipe.accelerator not in ("auto", "gpu", "cuda") or not torch.cuda.is_available():
        return False
    if not isinstance(recipe.data.images, ImageSettings) or recipe.precision != "bf16-mixed" or processes < 1:
        return False
    if recipe.compile != "auto" or graphs_unsupported_reason(recipe) is not None:
        return False
    return torch.cuda.mem_get_info()[0] >= _ROOM


def _free_cores(jobs: int) -> int:
    return (os.cpu_count() or 1) - 1 - jobs


def _start(recipe: Recipe, count: int) -> list[subprocess.Popen[bytes]]:
    """Start as many processes as there are to share the network, but for those that have nothing left to do."""
    images = recipe.data.images
    processes = []
    for place in range(count):
        order = {
            "model": recipe.model.name,
            "options": recipe.model.all_options,
            "sizes": [images.size, images.evaluated_size],
            "batch": recipe.batch_size,
            "precision": recipe.precision,
            "share": [place, count],
        }
        text = json.dumps(order, sort_keys=True)
        if marker(text).exists():
            continue
        command = [sys.executable, "-m", "kronattn.training.precompile_worker", text]
        # Whatever goes wrong here, the run itself meets it, and says so.
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    return processes
