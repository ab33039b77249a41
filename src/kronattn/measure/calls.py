"""What processes of their own measure: networks and segmentation heads, from the public names alone.

The file is run by its path with the source tree to measure on PYTHONPATH, which may be an earlier one. So it imports
nothing that came later than the networks and heads themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["build_network", "head_call", "network_call", "training_of"]


def build_network(name: str) -> nn.Module:
    """One of our networks, "torchvision/NAME" or "timm/NAME"."""
    library, _, model = name.rpartition("/")
    if not library:
        import kronattn

        return kronattn.create_model(model)
    try:
        if library == "torchvision":
            import torchvision

            return torchvision.models.get_model(model, weights=None)
        import timm

        return timm.create_model(model)
    except ModuleNotFoundError as missing:
        extra = {"torchvision": "vision", "timm": "timm"}[library]
        raise ModuleNotFoundError(f"{name} needs {missing.name}: pip install 'kronattn[{extra}]'") from None


def network_call(
    name: str,
    work: str,
    *,
    how: str = "eager",
    batch: int,
    size: int,
    device: str = "cpu",
    dtype: str = "float32",
    channels_last: bool = False,
) -> Callable[[], Any]:
    """A function that sends a batch of images through a network; in "training" with backward and an SGD step."""
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = build_network(name).to(device, memory_format=layout)  # type: ignore[call-overload]
    images = torch.randn((batch, 3, size, size), device=device).contiguous(memory_format=layout)
    labels = torch.randint(1000, (batch,), device=device)
    half = dtype in ("float16", "bfloat16")
    run = torch.compile(model) if how == "compiled" else model

    def forward() -> Tensor:
        # Weights change between the replays of a graph: a cast that is kept from the capture would be stale.
        with torch.autocast(
            torch.device(device).type, dtype=getattr(torch, dtype), enabled=half, cache_enabled=how != "graphs"
        ):
            return run(images)

    if work == "inference":
        model.eval()
        return forward
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=4e-5)

    def train() -> None:
        # Timing runs in inference mode, which training has to leave.
        with torch.inference_mode(False), torch.enable_grad():
            nn.functional.cross_entropy(forward(), labels).backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    return train


def head_call(
    build: str,
    mode: str | None,
    work: str,
    *,
    batch: int,
    grid: int,
    channels: int,
    num_classes: int,
    device: str = "cpu",
    dtype: str = "float32",
    channels_last: bool = False,
) -> Callable[[], Any]:
    """A function that runs a segmentation head, "module:Class", on features that are there already."""
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    # Post-ReLU, as a backbone's are.
    features = torch.randn(batch, channels, grid, grid).relu().to(device, getattr(torch, dtype))
    features = features.contiguous(memory_format=layout)
    head: Any = resolve_name(build)(channels, num_classes, *([mode] if mode else []))
    head = head.to(device, features.dtype, memory_format=layout)
    if work == "training":
        return training_of(head.train(), features)
    head.eval()
    return lambda: head(features)


def training_of(module: nn.Module, x: Tensor) -> Callable[[], Any]:
    """Forward and backward, to the input and the weights."""
    leaf = x.clone().requires_grad_()
    wanted = [leaf, *module.parameters()]

    def train() -> Any:
        # Timing runs in inference mode, which training has to leave.
        with torch.inference_mode(False), torch.enable_grad():
            output = module(leaf)
            return torch.autograd.grad(output, wanted, torch.ones_like(output))

    return train
