"""Images a second of our networks and of their peers, in training and inference, as ratios within one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from kronattn.measure import describe_environment, peak_memory, time_calls
from kronattn.models.registry import CLASSIFIERS, create_model
from kronattn.present import Cell, Column, Group, Table, format_significant

__all__ = ["BASE", "DEFAULT_NETWORKS", "Settings", "Speed", "bench_networks", "speed_table", "to_json"]

# Everything is a ratio to this one, measured in the same run.
BASE = "torchvision/mobilenet_v2"
PEERS = (
    "timm/mobilenetv2_100",
    "timm/mobilenetv3_large_100",
    "timm/mobilenetv4_conv_small",
    "timm/efficientnet_b0",
)
DEFAULT_NETWORKS = (BASE, "kanet_kv", "kanet_qkv", "mobilenetv2", "mobilenetv2_kao", "kanet_without_kao", *PEERS)


@dataclass(frozen=True)
class Settings:
    """How to run the networks.

    >>> Settings().batch
    16
    """

    device: torch.device = torch.device("cpu")  # noqa: RUF009 - a device does not change
    dtype: torch.dtype = torch.float32
    batch: int = 16
    size: int = 224
    channels_last: bool = False
    seconds: float = 8.0


@dataclass(frozen=True)
class Speed:
    """One network in one way of running it: images a second, and bytes at the peak beyond its weights."""

    network: str
    work: str  # "training" or "inference"
    how: str  # "eager" or "compiled"
    images_per_second: float
    images_per_second_quartiles: tuple[float, float]
    ratio: float
    peak_bytes: int


def bench_networks(
    networks: Sequence[str] = DEFAULT_NETWORKS,
    works: Sequence[str] = ("inference", "training"),
    hows: Sequence[str] = ("eager",),
    settings: Settings | None = None,
    track: Callable[[Sequence[tuple[str, str]]], Iterable[tuple[str, str]]] = lambda items: items,
) -> list[Speed]:
    """Measure networks against each other: for each way of running them, they take turns.

    Args:
        networks: our names, "torchvision/NAME" or "timm/NAME"; the base of the ratios is added where it is missing.
        works: "inference" and "training" (forward, backward and an SGD step).
        hows: "eager" and "compiled".
        settings: device, dtype, batch and size.
        track: wraps the loop over ways of running, in a progress bar for instance.
    """
    settings = settings or Settings()
    names = list(dict.fromkeys([BASE, *networks]))
    for name in names:
        _check_name(name)
    speeds = []
    for work, how in track([(work, how) for how in hows for work in works]):
        calls = {name: _call(name, work, how, settings) for name in names}
        timings = time_calls(
            calls, device=settings.device, seconds=settings.seconds, least=3, most=9, sample_seconds=0.05
        )
        memory = {name: peak_memory(call, device=settings.device) for name, call in calls.items()}
        base = timings[BASE].median
        speeds += [
            Speed(
                network=name,
                work=work,
                how=how,
                images_per_second=settings.batch / timing.median,
                images_per_second_quartiles=(settings.batch / timing.upper, settings.batch / timing.lower),
                ratio=base / timing.median,
                peak_bytes=memory[name],
            )
            for name, timing in timings.items()
        ]
        del calls
    return speeds


def _check_name(name: str) -> None:
    library, _, model = name.rpartition("/")
    if library not in ("", "torchvision", "timm") or (not library and model not in CLASSIFIERS):
        known = ", ".join([*CLASSIFIERS, "torchvision/NAME", "timm/NAME"])
        raise ValueError(f"unknown network {name!r}: known are {known}")


def _build(name: str) -> nn.Module:
    library, _, model = name.rpartition("/")
    if not library:
        return create_model(model)
    try:
        if library == "torchvision":
            import torchvision

            return torchvision.models.get_model(model, weights=None)
        import timm

        return timm.create_model(model)
    except ModuleNotFoundError as missing:
        extra = {"torchvision": "vision", "timm": "timm"}[library]
        raise ModuleNotFoundError(f"{name} needs {missing.name}: pip install 'kronattn[{extra}]'") from None


def _call(name: str, work: str, how: str, settings: Settings) -> Callable[[], Any]:
    """A function of no arguments that does the work once."""
    torch.manual_seed(0)
    layout = torch.channels_last if settings.channels_last else torch.contiguous_format
    model = _build(name).to(settings.device, memory_format=layout)  # type: ignore[call-overload]
    shape = (settings.batch, 3, settings.size, settings.size)
    images = torch.randn(shape, device=settings.device).contiguous(memory_format=layout)
    labels = torch.randint(1000, (settings.batch,), device=settings.device)
    device = settings.device.type
    half = settings.dtype in (torch.float16, torch.bfloat16)
    run = torch.compile(model) if how == "compiled" else model

    def infer() -> Any:
        with torch.autocast(device, dtype=settings.dtype, enabled=half):
            return run(images)

    def train() -> Any:
        # Timing runs in inference mode, which training has to leave.
        with torch.inference_mode(False), torch.enable_grad():
            with torch.autocast(device, dtype=settings.dtype, enabled=half):
                loss = nn.functional.cross_entropy(run(images), labels)
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

    if work == "inference":
        model.eval()
        return infer
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=4e-5)
    return train


def speed_table(speeds: Sequence[Speed], settings: Settings) -> Table:
    """The speeds for readers: a group for each way of running."""
    columns = (
        Column("Network", numeric=False),
        Column("images/s"),
        Column("quartiles"),
        Column("ratio"),
        Column("peak MB"),
    )
    groups = []
    for work, how in dict.fromkeys((speed.work, speed.how) for speed in speeds):
        rows = [
            [
                Cell(speed.network),
                Cell(format_significant(speed.images_per_second)),
                Cell("–".join(format_significant(value) for value in speed.images_per_second_quartiles)),
                Cell(f"{speed.ratio:.2f}×"),
                Cell(format_significant(speed.peak_bytes / 1e6)),
            ]
            for speed in speeds
            if (speed.work, speed.how) == (work, how)
        ]
        groups.append(Group(f"{work}, {how}", rows))
    layout = "channels_last" if settings.channels_last else "contiguous"
    size = f"batch {settings.batch}, {settings.size}×{settings.size}, {str(settings.dtype).removeprefix('torch.')}"
    note = f"Ratio: images a second over those of {BASE} in the same run. Peak: beyond weights and input."
    return Table(f"Networks, {size}, {layout}", columns, groups, [note])


def to_json(speeds: Sequence[Speed], settings: Settings) -> dict[str, Any]:
    """The speeds as one JSON object, with what they were measured on."""
    return {
        "rows": [asdict(speed) for speed in speeds],
        "settings": {
            "batch": settings.batch,
            "size": settings.size,
            "channels_last": settings.channels_last,
            "dtype": str(settings.dtype).removeprefix("torch."),
        },
        "environment": describe_environment(settings.device, settings.dtype),
    }
