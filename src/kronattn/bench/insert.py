"""What Kronecker attention adds to other people's networks: with it and without it, by turns in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from runpy import run_path
from typing import Any

import torch

from kronattn.measure import Call, Comparison, Row, Way, compare, count_madd, count_parameters
from kronattn.present import Table, round_significant, tabulate

__all__ = ["EXAMPLES", "bench_insert", "insert_table"]

# The guide's examples, by name: the file, what builds it from the arguments and whether there is attention, the shape
# of its input, and what readers call it.
EXAMPLES: dict[str, tuple[str, tuple[Any, ...], tuple[int, ...], str]] = {
    "timm_resnet": ("resnet", (), (1, 3, 224, 224), "ResNet-18, 224²"),
    "unet_block": ("UNetBlock", (64, 32), (1, 64, 128, 128), "U-Net block, 64 to 32 channels, 128²"),
    "video_block": ("VideoBlock", (32,), (1, 32, 8, 56, 56), "video block, 32 channels, 8 × 56²"),
}
WITHOUT, WITH = "without", "with"


def bench_insert(
    folder: Path,
    *,
    seconds: float = 10.0,
    track: Callable[[Sequence[Way]], Iterable[Way]] = iter,
) -> Comparison:
    """Measure each example of the guide with attention and without: parameters, multiply-adds, time, memory.

    Args:
        folder: where the examples lie, docs/examples of a checkout.
        seconds: of timing for each example and kind of work.
        track: wraps the loop over them, in a progress bar for instance.
    """
    missing = [name for name in EXAMPLES if not (folder / f"{name}.py").is_file()]
    if missing:
        raise FileNotFoundError(f"there is no file {folder / missing[0]}.py: --examples is docs/examples of a checkout")

    def build(name: str, way: Way) -> Any:
        function, arguments, _, _ = EXAMPLES[way.case["example"]]
        torch.manual_seed(0)
        return run_path(str(folder / f"{way.case['example']}.py"))[function](*arguments, name == WITH)

    def count(name: str, way: Way) -> dict[str, int]:
        model = build(name, way).eval()
        return {"params": count_parameters(model)[0], "madd": count_madd(model, torch.randn(way.case["input"]))}

    def prepare(name: str, way: Way) -> Call:
        model, x = build(name, way), torch.randn(way.case["input"])
        if way.work == "inference":
            model.eval()
            return Call(lambda: model(x))
        model.train()
        images = x.repeat(2, *[1] * (x.dim() - 1))  # a batch norm wants more than one sample

        def train() -> None:
            # Timing runs in inference mode, which training has to leave.
            with torch.inference_mode(False), torch.enable_grad():
                model(images.clone()).square().mean().backward()
                model.zero_grad(set_to_none=True)

        return Call(train)

    ways = [
        Way({"example": name, "input": list(shape)}, work)
        for name, (_, _, shape, _) in EXAMPLES.items()
        for work in ("inference", "training")
    ]
    return compare("insert", [WITHOUT, WITH], ways, prepare, base=WITHOUT, count=count, seconds=seconds, track=track)


def insert_table(found: Comparison) -> Table:
    """What attention adds to each example: ratios of with to without."""

    def times(row: Row, figure: str, beside: Callable[[Any], str]) -> str | None:
        share = found.share(row, WITHOUT, figure)
        decimals = 2 if figure == "time_ms" else 3
        return None if share is None else f"{share:.{decimals}f}× ({beside(getattr(row, figure))})"

    def trained(row: Row) -> str | None:
        other = found.find(WITH, Way(row.case, "training"))
        return None if other is None else times(other, "time_ms", lambda ms: f"{round_significant(ms)} ms")

    return tabulate(
        "",
        {
            "": lambda row: EXAMPLES[row.case["example"]][3],
            "parameters": lambda row: times(row, "params", lambda count: f"{count:,}"),
            "MAdd": lambda row: times(row, "madd", lambda count: f"{count:,}"),
            "inference": lambda row: times(row, "time_ms", lambda ms: f"{round_significant(ms)} ms"),
            "training": trained,
        },
        [row for row in found.measured if (row.candidate, row.work) == (WITH, "inference")],
    )
