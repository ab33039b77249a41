"""Where the time of a captured training step goes, in Imagenette's setting, on made-up images.

Each stage is a CUDA graph of everything up to there, less the one before it: the median of five rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kronattn.data.datasets import DecodedImages
from kronattn.measure import replayed, time_calls
from kronattn.models import create_model
from kronattn.models.files import Description
from kronattn.ops.compat import lerp_all
from kronattn.training.device_step import DeviceStep
from kronattn.training.image_data import ImageData
from kronattn.training.optimisation import build_optimiser
from kronattn.training.recipe import load_recipe
from kronattn.training.task_module import TaskModule

__all__ = ["STAGES", "time_stages"]

STAGES = ("augmentation", "forward", "backward", "optimiser", "moving average")
CLASSES = [str(number) for number in range(10)]
IMAGES = 2048


def time_stages(name: str, device: torch.device) -> dict[str, float]:
    """Milliseconds of each stage of a network's training step, and images a second of all of it."""
    recipe = load_recipe("imagenette/base")
    size, batch = recipe.data.images.resize, recipe.batch_size
    data = ImageData(recipe.data, batch, channels_last=True)
    pixels = torch.randint(256, (IMAGES, 3, size, size), dtype=torch.uint8, device=device)
    data._datasets["train"] = DecodedImages(pixels, torch.randint(len(CLASSES), (IMAGES,), device=device))
    indices = torch.randint(IMAGES, (batch,), device=device)
    options = {"num_classes": len(CLASSES), **recipe.model.options}
    network = create_model(name, **options).to(device).to(memory_format=torch.channels_last)
    module = TaskModule(network, recipe, Description(name, options, CLASSES))
    optimiser = build_optimiser(network, recipe.optimiser, capturable=True)
    values = [parameter.detach() for parameter in network.parameters()]
    averages = [value.clone() for value in values]

    def blend(share: Tensor) -> None:
        lerp_all(averages, values, share)

    step = DeviceStep(
        data.prepare_training, module.losses, optimiser, device=device, precision=recipe.precision, blend=blend
    )

    def until(stage: str) -> Any:
        if stage == "moving average":
            return step(indices)
        optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            prepared = data.prepare_training((indices,))
        if stage == "augmentation":
            return prepared
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = module.losses(prepared)["loss"]
        if stage == "forward":
            return loss
        loss.backward()
        if stage == "optimiser":
            step._move_weights()
        return loss.detach()

    times = [_graph_ms(partial(until, stage), device) for stage in STAGES]
    found = {stage: round(b - a, 3) for stage, a, b in zip(STAGES, [0.0, *times], times, strict=False)}
    return {**found, "step": round(times[-1], 3), "images_per_second": round(1000 * batch / times[-1])}


def _graph_ms(function: Callable[[], Any], device: torch.device) -> float:
    calls = {"graph": replayed(lambda _: function(), [None])}
    return 1e3 * time_calls(calls, device=device, least=5, most=5, sample_seconds=0.5)["graph"].median
