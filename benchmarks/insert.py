"""What Kronecker attention costs in other people's networks: the examples of docs/insert.md with and without it.

Run `python benchmarks/insert.py results/insert-cpu.json`. Parameters and multiply-adds are exact; the times of both
forms take turns within one run, forward in evaluation mode and forward plus backward in training mode.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.measure import count_madd, describe_environment, time_calls
from kronattn.tables.networks import count_parameters

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docs" / "examples"))

SECONDS = 10.0


def cases() -> dict[str, tuple[Callable[[bool], nn.Module], tuple[int, ...]]]:
    """By name: what builds the network with and without attention, and the shape of its input."""
    from timm_resnet import resnet
    from unet_block import UNetBlock
    from video_block import VideoBlock

    return {
        "timm_resnet": (resnet, (1, 3, 224, 224)),
        "unet_block": (lambda attention: UNetBlock(64, 32, attention), (1, 64, 128, 128)),
        "video_block": (lambda attention: VideoBlock(32, attention), (1, 32, 8, 56, 56)),
    }


def measure(name: str, seconds: float = SECONDS) -> dict[str, Any]:
    """One example: parameters, multiply-adds and times, and the ratios of with over without."""
    build, shape = cases()[name]
    torch.manual_seed(0)
    models = {"without": build(False), "with": build(True)}
    x = torch.randn(shape)
    found: dict[str, Any] = {"example": name, "input": list(shape)}
    for key, model in models.items():
        found[f"params_{key}"] = count_parameters(model)[0]
        found[f"madd_{key}"] = count_madd(model.eval(), x)
    for work, call in (("inference", _infer), ("training", _train)):
        timings = time_calls({key: call(model, x) for key, model in models.items()}, seconds=seconds)
        found[f"{work}_ms"] = {key: timing.median * 1e3 for key, timing in timings.items()}
        found[f"{work}_ratio"] = timings["with"].median / timings["without"].median
    return found


def _infer(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    def call() -> Any:
        return model.eval()(x)

    return call


def _train(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    images = x.repeat(2, *[1] * (x.dim() - 1))  # a batch norm wants more than one sample

    def call() -> None:
        # Timing runs in inference mode, which training has to leave.
        with torch.inference_mode(False), torch.enable_grad():
            model.train()(images.clone()).square().mean().backward()
            model.zero_grad(set_to_none=True)

    return call


def main() -> int:
    """Measure all examples, print the ratios, and write the file where one is named."""
    rows = [measure(name) for name in cases()]
    for row in rows:
        print(f"{row['example']}: inference {row['inference_ratio']:.2f}, training {row['training_ratio']:.2f}")
    if sys.argv[1:]:
        Path(sys.argv[1]).write_text(json.dumps({"rows": rows, "environment": describe_environment()}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
