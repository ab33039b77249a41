"""``kronattn bench``: speed against peers, as ratios within one run."""

from __future__ import annotations

import json as json_module
from pathlib import Path

import typer

from kronattn.cli.output import check_writable, console, print_json, progress, write_atomically

__all__ = ["app", "networks"]

app = typer.Typer(no_args_is_help=True, help="Speed against peers, as ratios within one run.")


@app.callback()
def _bench() -> None: ...


@app.command()
def networks(
    models: str = typer.Option("", help="Comma-separated: our names, torchvision/NAME, timm/NAME. Default: all."),
    device: str = typer.Option("cpu", help="Where to run: cpu, cuda, cuda:1."),
    dtype: str = typer.Option("float32", help="float32, or bfloat16 and float16 through autocast."),
    batch: int = typer.Option(16, min=1, help="Images in a batch."),
    size: int = typer.Option(224, min=32, help="Height and width of the images."),
    channels_last: bool = typer.Option(False, "--channels-last", help="Keep channels side by side in memory."),
    work: str = typer.Option("inference,training", help="inference, training, or both."),
    how: str = typer.Option("eager", help="eager, compiled, or both."),
    seconds: float = typer.Option(8.0, min=0.01, help="Time to spend on each way of running."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
    output: Path | None = typer.Option(None, help="Write the JSON object into this file too."),
) -> None:
    """Images a second of our networks against torchvision's and timm's.

    Example: kronattn bench networks --batch 1 --work inference --models kanet_kv,kanet_qkv,mobilenetv2
    """
    from kronattn.bench.networks import (
        DEFAULT_NETWORKS,
        Settings,
        bench_networks,
        speed_table,
        to_json,
    )
    from kronattn.measure import resolve_device, resolve_dtype
    from kronattn.tables.rendering import to_rich

    works = _choices(work, "--work", ("inference", "training"))
    hows = _choices(how, "--how", ("eager", "compiled"))
    if output is not None:
        check_writable(output)
    settings = Settings(resolve_device(device), resolve_dtype(dtype), batch, size, channels_last, seconds)
    names = [name.strip() for name in models.split(",") if name.strip()] or DEFAULT_NETWORKS
    speeds = bench_networks(names, works, hows, settings, track=lambda ways: progress(ways, "Measuring"))
    found = to_json(speeds, settings)
    if output is not None:
        write_atomically(output, json_module.dumps(found, indent=2) + "\n")
    if json:
        print_json(found)
        return
    console.print(to_rich(speed_table(speeds, settings), width=console.width))
    console.print(", ".join(f"{name} {value}" for name, value in found["environment"].items()), style="dim")


def _choices(given: str, option: str, known: tuple[str, ...]) -> list[str]:
    chosen = [choice.strip() for choice in given.split(",")]
    for choice in chosen:
        if choice not in known:
            raise ValueError(f"{option} must be {' or '.join(known)}, or both with a comma, not {choice!r}")
    return chosen
