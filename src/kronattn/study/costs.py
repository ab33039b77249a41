"""What each layer costs in its place: time and memory of the whole network's forward pass, layers by turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kronattn.measure import Call, Row, Way, compare, replayed
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
    on_gpu = device.type == "cuda"
    batch = part.base.batch_size if on_gpu else 1
    half = on_gpu and part.base.precision == "bf16-mixed"
    fold = part.folds[0] if part.folds else None
    recipes = {name: Run(part, study.layers[name], FINAL, 0, fold).recipe(data, None) for name in part.layers}
    # The data is the same for all: it is read once.
    classes = load_data_module(part.task)(recipes[part.layers[0]].data, part.base.batch_size)
    sizes = part.task.example(describe(recipes[part.layers[0]], part.task, classes)).shape[1:]

    def prepare(name: str, way: Way) -> Call:
        description = describe(recipes[name], part.task, classes)
        network = build_model(description.model, description.options).to(device).eval()
        x = torch.randn(batch, *sizes, device=device)
        if part.base.channels_last:
            layout = torch.channels_last_3d if x.dim() == 5 else torch.channels_last
            network, x = network.to(memory_format=layout), x.to(memory_format=layout)

        def call() -> Tensor:
            # Without its cache, which a captured graph would read from where nothing is any more.
            with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):
                return network(x)

        with torch.inference_mode():
            return Call(replayed(lambda _: call(), [None]) if on_gpu else call, once=call)

    way = Way({"batch": batch, "sizes": list(sizes)})
    found = compare("costs", part.layers, [way], prepare, base=part.layers[0], device=device, seconds=seconds)
    what = f"a forward pass of {batch} × {'×'.join(map(str, sizes))}"
    how = "bfloat16, as a CUDA graph" if half else f"float32, {found.environment['threads']} threads"
    return {
        "name": found.environment["device"],
        "how": f"{what}, {how}",
        "layers": {row.candidate: _seconds(row) | {"peak_bytes": row.memory_bytes} for row in found.measured},
        "environment": found.environment,
    }


def _seconds(row: Row) -> dict[str, float]:
    assert row.time_ms is not None
    assert row.quartiles_ms is not None
    return {"seconds": row.time_ms / 1e3, "lower": row.quartiles_ms[0] / 1e3, "upper": row.quartiles_ms[1] / 1e3}
