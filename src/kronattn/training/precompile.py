"""Compile a network's kernels in processes of their own, block by block, while its images are decoded.

Triton compiles a kernel when it is first launched, one after the other: on an NVIDIA H200 a network that nobody has
trained there took 50 s over its first steps. What these processes compile lies in Triton's cache, where the run's own
process finds it. They start from the network's end, since the run starts from its beginning.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.data.transforms import ImageSettings
from kronattn.models.files import build_model
from kronattn.training.compiling import graphs_unsupported_reason, keep_compiled_code
from kronattn.training.device_step import AUTOCAST
from kronattn.training.recipe import Recipe
from kronattn.version import __version__

__all__ = ["precompiling", "shapes_of_units"]

# More would wait for each other's imports and for the compiler's.
_PROCESSES = 6
# Bytes on the GPU: each of them holds its libraries there, and a few activations.
_ROOM = 24 * 2**30


@contextmanager
def precompiling(recipe: Recipe) -> Iterator[None]:
    """Have the kernels of the recipe's network compiled in the background, where its steps will run on a GPU."""
    if recipe.cache is not None:
        keep_compiled_code(Path(recipe.cache))
    processes = _start(recipe) if _is_worth_it(recipe) else []
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _is_worth_it(recipe: Recipe) -> bool:
    if recipe.accelerator not in ("auto", "gpu", "cuda") or not torch.cuda.is_available():
        return False
    if not isinstance(recipe.data.images, ImageSettings) or recipe.precision != "bf16-mixed" or _free_cores() < 1:
        return False
    if recipe.compile != "auto" or graphs_unsupported_reason(recipe) is not None:
        return False
    return torch.cuda.mem_get_info()[0] >= _ROOM


def _free_cores() -> int:
    return (os.cpu_count() or 1) - 2


def _start(recipe: Recipe) -> list[subprocess.Popen[bytes]]:
    images = recipe.data.images
    count = min(_PROCESSES, _free_cores())
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
        if _marker(text).exists():
            continue
        command = [sys.executable, "-m", "kronattn.training.precompile", text]
        # Whatever goes wrong here, the run itself meets it, and says so.
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    return processes


def _marker(order: str) -> Path:
    """A file in Triton's cache that says that an order has been carried out there, by these versions."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    known = f"{order} {device} {torch.__version__} {__version__}"
    return cache / f"kronattn-{hashlib.sha256(known.encode()).hexdigest()[:32]}"


def shapes_of_units(network: nn.Module, size: int) -> dict[str, tuple[int, ...]]:
    """The parts that a network is put together from, outermost first, and the shapes that they receive for one image.

    ``network`` is moved to the meta device, which computes shapes alone.

    Example:
        >>> from kronattn.models import create_model
        >>> shapes = shapes_of_units(create_model("kanet_kv"), 64)
        >>> shapes["stem"], shapes["stages.9.0"]
        ((1, 3, 64, 64), (1, 160, 2, 2))
    """
    network = network.to("meta").eval()
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str) -> Any:
        return lambda module, inputs: shapes.__setitem__(name, tuple(inputs[0].shape))

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if isinstance(child, nn.Sequential | nn.ModuleList):
                visit(child, f"{prefix}{name}.")
            else:
                child.register_forward_pre_hook(note(f"{prefix}{name}"))

    visit(network, "")
    network(torch.empty(1, 3, size, size, device="meta"))
    return shapes


def _compile_share(order: dict[str, Any]) -> None:
    """Run this process's share of the network's parts, forward, backward and in evaluation, on noise."""
    network = build_model(order["model"], order["options"])
    train, evaluate = (shapes_of_units(build_model(order["model"], order["options"]), s) for s in order["sizes"])
    place, count = order["share"]
    for name in list(reversed(train))[place::count]:
        unit = network.get_submodule(name).cuda().to(memory_format=torch.channels_last)
        with torch.autocast("cuda", AUTOCAST[order["precision"]], cache_enabled=False):
            y = unit.train()(_noise(order["batch"], train[name]).requires_grad_())
        y.float().sum().backward()
        with torch.no_grad(), torch.autocast("cuda", AUTOCAST[order["precision"]]):
            unit.eval()(_noise(order["batch"], evaluate[name]))


def _noise(batch: int, shape: tuple[int, ...]) -> Tensor:
    x = torch.randn(batch, *shape[1:], device="cuda", dtype=torch.bfloat16)
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x


if __name__ == "__main__":
    if hasattr(os, "nice"):
        os.nice(5)
    _compile_share(json.loads(sys.argv[1]))
    _marker(sys.argv[1]).touch()
