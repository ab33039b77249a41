"""What each layer costs in its place: time and memory of the whole network's forward pass, layers by turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.measure import describe_environment, peak_memory, replayed, time_calls
from kronattn.models.files import build_model
from kronattn.study.plan import Run
from kronattn.study.settings import Part, Study
from kronattn.study.stages import FINAL
from kronattn.training.data import load_data_module
from kronattn.training.run import describe

__all__ = ["measure_costs"]


def measure_costs(study: Study, data: Path, device: torch.device, *, seconds: float = 4.0) -> dict[str, Any]:
    """By data set and kind of device: each layer's ``seconds`` and ``peak_bytes``.

    A CPU sees one sample in float32; a GPU the recipe's batch in its precision, as a CUDA graph.

    Args:
        data: the folder with all data, for the number of classes.
        seconds: that the turns of one data set take.
    """
    return {part.name: {device.type: _measure_part(study, part, data, device, seconds)} for part in study.parts}


def _measure_part(study: Study, part: Part, data: Path, device: torch.device, seconds: float) -> dict[str, Any]:
    batch = part.base.batch_size if device.type == "cuda" else 1
    half = device.type == "cuda" and part.base.precision == "bf16-mixed"
    calls: dict[str, Callable[[], Any]] = {}
    peaks = {}
    classes = None
    for name in part.layers:
        recipe = Run(part, study.layers[name], FINAL, 0, part.folds[0] if part.folds else None).recipe(data, None)
        if classes is None:
            # The data is the same for all: it is read once.
            classes = load_data_module(part.task)(recipe.data, recipe.batch_size)
        description = describe(recipe, part.task, classes)
        network = build_model(description.model, description.options).to(device).eval()
        shape = part.task.example(description).shape[1:]
        x = torch.randn(batch, *shape, device=device)
        if recipe.channels_last:
            layout = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
            network, x = network.to(memory_format=layout), x.to(memory_format=layout)
        call = _forward(network, x, half)
        peaks[name] = peak_memory(call, device=device)
        calls[name] = _captured(call) if device.type == "cuda" else call
    timings = time_calls(calls, device=device, seconds=seconds)
    described = describe_environment(device)
    what = f"a forward pass of {batch} × {'×'.join(map(str, shape))}"
    how = f"{what}, bfloat16, as a CUDA graph" if half else f"{what}, float32, {described['threads']} threads"
    return {
        "name": described["device"],
        "how": how,
        "layers": {
            name: {"seconds": timings[name].median, "lower": timings[name].lower, "upper": timings[name].upper}
            | {"peak_bytes": peaks[name]}
            for name in part.layers
        },
        "environment": described,
    }


def _forward(network: nn.Module, x: Tensor, half: bool) -> Callable[[], Any]:
    def call() -> Tensor:
        # Without its cache, which a captured graph would read from where nothing is any more.
        with torch.autocast(x.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            return network(x)

    return call


def _captured(call: Callable[[], Any]) -> Callable[[], None]:
    with torch.inference_mode():
        return replayed(lambda _: call(), [None])
