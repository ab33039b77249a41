"""A process that compiles its share of a network's kernels, block by block: see :mod:`kronattn.training.precompile`.

It starts from the network's end, since the run starts from its beginning.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.models.files import build_model
from kronattn.training.device_step import AUTOCAST
from kronattn.version import __version__

__all__ = ["compile_share", "marker", "shapes_of_units"]


def marker(order: str) -> Path:
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


def compile_share(order: dict[str, Any]) -> None:
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
    compile_share(json.loads(sys.argv[1]))
    marker(sys.argv[1]).touch()
