"""``kronattn bench``: speed against peers, as ratios within one run."""

from __future__ import annotations

import json as json_module
from functools import partial
from pathlib import Path

import typer

from kronattn.cli.output import (
    QUIET_HELP,
    be_quiet,
    check_figure,
    check_writable,
    console,
    print_json,
    progress,
    write_atomically,
    write_figure,
)
from kronattn.cli.train import CONTEXT, overrides_of

__all__ = ["app", "export", "heads", "latency", "loader", "networks", "operators"]

app = typer.Typer(no_args_is_help=True, help="Speed against peers, as ratios within one run.")


@app.callback()
def _bench() -> None: ...


@app.command()
def networks(
    models: str = typer.Option("", help="Comma-separated: our names, torchvision/NAME, timm/NAME. Default: all."),
    device: str = typer.Option("cpu", help="Where to run: auto, cpu, cuda, cuda:1, mps."),
    dtype: str = typer.Option("float32", help="float32, or bfloat16 and float16 through autocast."),
    batch: int = typer.Option(16, min=1, help="Images in a batch."),
    size: int = typer.Option(224, min=32, help="Height and width of the images."),
    channels_last: bool = typer.Option(False, "--channels-last", help="Keep channels side by side in memory."),
    work: str = typer.Option("inference,training", help="inference, training, or both."),
    how: str = typer.Option("eager", help="eager, compiled, or both."),
    seconds: float = typer.Option(8.0, min=0.01, help="Time to spend on each way of running."),
    quiet: bool = typer.Option(False, "--quiet", "-q", callback=be_quiet, help=QUIET_HELP),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the JSON object into this file too."),
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


@app.command()
def operators(
    names: str = typer.Option("", "--operators", help="Comma-separated. Default: all that can run, uncompiled."),
    shapes: str = typer.Option(
        "", help="Comma-separated, like 64x64x56x56. Default: eight on a GPU, two small ones elsewhere."
    ),
    device: str = typer.Option("auto", help="Where to run: auto, cpu, cuda, cuda:1, mps."),
    dtype: str = typer.Option(
        "", help="float32, float16, bfloat16 or float64. Default: bfloat16 on a GPU, else float32."
    ),
    contiguous: bool = typer.Option(False, "--contiguous", help="Inputs with positions side by side, not channels."),
    training: bool = typer.Option(True, help="Measure forward plus backward too."),
    seconds: float = typer.Option(0.2, min=0.001, help="Time to spend on each measurement."),
    load: Path | None = typer.Option(None, help="Show an earlier run's JSON file instead of measuring."),
    quiet: bool = typer.Option(False, "--quiet", "-q", callback=be_quiet, help=QUIET_HELP),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the JSON object into this file too."),
    figure: Path | None = typer.Option(None, help="Draw a figure into this file, .png or .svg."),
) -> None:
    """What attention operators cost beside a copy of their input: ours, fused, axial, criss-cross, efficient.

    Example: kronattn bench operators --shapes 64x64x56x56 --output operators.json --figure operators.svg
    """
    from kronattn.bench.operators import (
        SHAPES,
        SMALL_SHAPES,
        bench_operators,
        cost_table,
        draw_costs,
        from_json,
        parse_shapes,
        to_json,
    )
    from kronattn.measure import resolve_device, resolve_dtype
    from kronattn.tables.rendering import to_rich

    if figure is not None:
        check_figure(figure, "--figure")
    if output is not None:
        check_writable(output)
    if load is not None:
        found = json_module.loads(load.read_text())
        costs = from_json(found)
    else:
        on = resolve_device(device)
        of = resolve_dtype(dtype or ("bfloat16" if on.type == "cuda" else "float32"))
        costs = bench_operators(
            [name.strip() for name in names.split(",")] if names else None,
            parse_shapes(shapes) if shapes else SHAPES if on.type == "cuda" else SMALL_SHAPES,
            device=on,
            dtype=of,
            channels_last=not contiguous,
            training=training,
            seconds=seconds,
            track=lambda pairs: progress(pairs, "Measuring"),
        )
        found = to_json(costs, device=on, dtype=of, channels_last=not contiguous)
    if output is not None:
        write_atomically(output, json_module.dumps(found, indent=2) + "\n")
    if figure is not None:
        write_figure(figure, draw_costs(costs))
    if json:
        print_json(found)
        return
    console.print(to_rich(cost_table(costs), width=console.width))
    console.print(", ".join(f"{name} {value}" for name, value in found["environment"].items()), style="dim")


@app.command(context_settings=CONTEXT)
def loader(
    context: typer.Context,
    config: str = typer.Option(..., help="The recipe: a YAML file, or the name of ours."),
    data: str | None = typer.Option(None, help="Where the images lie: a folder, a .tar, a pattern."),
    epochs: int = typer.Option(4, min=2, help="Epochs of each kind; the first is left out."),
    quiet: bool = typer.Option(False, "--quiet", "-q", callback=be_quiet, help=QUIET_HELP),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of a line."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the JSON object into this file too."),
) -> None:
    """Whether data holds training back: images a second with a recipe's data, and with one batch again and again.

    Example: kronattn bench loader --config digits
    """
    from kronattn.bench.loader import bench_loader
    from kronattn.training.recipe import load_recipe

    if output is not None:
        check_writable(output)
    recipe = load_recipe(config, [*overrides_of(context.args), *([f"data.path={data}"] if data else [])])
    found = bench_loader(recipe, epochs=epochs, track=progress)
    if output is not None:
        write_atomically(output, json_module.dumps(found, indent=2) + "\n")
    if json:
        print_json(found)
        return
    speed = f"{found['images_per_second']:,.0f} images a second"
    share = f"{100 * found['kept']:.1f}% of the {found['without_data']:,.0f} without data"
    console.print(f"{found['model']} on {found['data']} at {found['size']} px: {speed}, {share}", highlight=False)


@app.command()
def heads(
    names: str = typer.Option("", help="Comma-separated: aspp, attn, attn_fused, kao_kv, kao_qkv. Default: all."),
    sizes: str = typer.Option("321,513,1025", help="Heights and widths of the images, with commas between."),
    channels: int = typer.Option(2048, min=1, help="Channels of the features: 2048 for ResNet-101 and 50."),
    stride: int = typer.Option(8, min=1, help="Output stride of the features."),
    classes: int = typer.Option(21, min=1, help="Classes."),
    batch: int = typer.Option(1, min=1, help="Images in a batch."),
    device: str = typer.Option("cpu", help="Where to run: auto, cpu, cuda, cuda:1, mps."),
    dtype: str = typer.Option("float32", help="float32, float16, bfloat16 or float64."),
    channels_last: bool = typer.Option(False, "--channels-last", help="Keep channels side by side in memory."),
    work: str = typer.Option("inference", help="inference, training, or both."),
    seconds: float = typer.Option(4.0, min=0.01, help="Time to spend on each size and way of running."),
    memory_budget: float | None = typer.Option(
        None, help="Gigabytes; heads that need more are left out. By default 4, or half of a GPU's."
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", callback=be_quiet, help=QUIET_HELP),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the JSON object into this file too."),
    figure: Path | None = typer.Option(None, help="Draw a figure into this file, .png or .svg."),
) -> None:
    """What segmentation heads cost by themselves, beyond the features: ASPP, regular and Kronecker attention.

    Example: kronattn bench heads --device cuda --dtype bfloat16 --channels-last --batch 8 --output heads.json
    """
    from kronattn.bench.heads import HEADS, WORKS, Case, draw_heads, head_table, measure_heads, parse_sizes, to_json
    from kronattn.measure import resolve_device, resolve_dtype
    from kronattn.tables.rendering import to_rich

    works = _choices(work, "--work", WORKS)
    chosen = parse_sizes(sizes)
    if memory_budget is not None and not memory_budget > 0:
        raise ValueError(f"--memory-budget must be positive, got {memory_budget}")
    if figure is not None:
        check_figure(figure, "--figure")
    if output is not None:
        check_writable(output)
    of = resolve_dtype(dtype)
    costs = measure_heads(
        [Case(size, batch, channels, stride, classes) for size in chosen],
        [name.strip() for name in names.split(",")] if names else tuple(HEADS),
        works=works,
        device=resolve_device(device),
        dtype=of,
        channels_last=channels_last,
        with_resize=True,
        seconds=seconds,
        memory_budget=None if memory_budget is None else int(memory_budget * 1e9),
        track=lambda cases: progress(cases, "Measuring"),
    )
    found = to_json(costs, dtype=of, channels_last=channels_last, sizes=chosen)
    if output is not None:
        write_atomically(output, json_module.dumps(found, indent=2) + "\n")
    if figure is not None:
        write_figure(figure, draw_heads(costs.rows))
    if json:
        print_json(found)
        return
    console.print(to_rich(head_table(costs), width=console.width))
    console.print(", ".join(f"{name} {value}" for name, value in costs.environment.items()), style="dim")


@app.command()
def export(
    models: str = typer.Option("", help="Comma-separated names. Default: mobilenetv2, kanet_kv, kanet_qkv."),
    runtimes: str = typer.Option("eager,compiled,onnxruntime", help="Which of the three."),
    batch: int = typer.Option(1, min=1, help="Images in a batch."),
    size: int = typer.Option(224, min=32, help="Height and width of the images."),
    seconds: float = typer.Option(20.0, min=0.01, help="Time to spend on timing; capturing takes longer."),
    quiet: bool = typer.Option(False, "--quiet", "-q", callback=be_quiet, help=QUIET_HELP),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the JSON object into this file too."),
) -> None:
    """Latency on the CPU of PyTorch eager, torch.compile and onnxruntime, KANet against MobileNetV2.

    Example: kronattn bench export --runtimes eager,onnxruntime --output latency.json
    """
    from kronattn.bench.export import DEFAULT_NETWORKS, RUNTIMES, bench_export, latency_table, to_json
    from kronattn.export.runtime import require_onnx
    from kronattn.models.registry import MODELS
    from kronattn.tables.rendering import to_rich

    chosen = _choices(runtimes, "--runtimes", RUNTIMES)
    names = [name.strip() for name in models.split(",") if name.strip()] or list(DEFAULT_NETWORKS)
    for name in names:
        if name not in MODELS:
            raise ValueError(f"unknown network {name!r}: known are {', '.join(MODELS)}")
    if "onnxruntime" in chosen:
        require_onnx()
    if output is not None:
        check_writable(output)
    track = partial(progress, description="Capturing")
    latencies = bench_export(names, chosen, batch=batch, size=size, seconds=seconds, track=track)
    found = to_json(latencies, batch=batch, size=size)
    if output is not None:
        write_atomically(output, json_module.dumps(found, indent=2) + "\n")
    if json:
        print_json(found)
        return
    console.print(to_rich(latency_table(latencies, batch=batch, size=size), width=console.width))
    console.print(", ".join(f"{name} {value}" for name, value in found["environment"].items()), style="dim")


@app.command()
def latency(
    models: str = typer.Option("", help="Comma-separated: our names, timm/NAME. Default: ours and two of timm's."),
    ways: str = typer.Option("", help="Comma-separated: some of the ways below. Default: all."),
    threads: int = typer.Option(2, min=1, help="Threads of each runtime."),
    batch: int = typer.Option(1, min=1, help="Images in a batch."),
    size: int = typer.Option(224, min=32, help="Height and width of the images."),
    rounds: int = typer.Option(20, min=1, help="Turns of each network."),
    turn_seconds: float = typer.Option(0.1, min=0.0, help="Seconds of a turn; three calls at least."),
    quiet: bool = typer.Option(False, "--quiet", "-q", callback=be_quiet, help=QUIET_HELP),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Write the JSON object into this file too."),
) -> None:
    """How long one image takes on the CPU, over mobilenetv2 run in the same way, by turns.

    Ways: eager, fused (kronattn.fuse), compiled (torch.compile of that), onnxruntime, onnxruntime-dynamic (any size),
    int8, and operators, which compares Kronecker attention with PyTorch's fused attention.

    Example: kronattn bench latency --ways fused,onnxruntime --threads 1 --output latency.json
    """
    from kronattn.bench.latency import DEFAULT_NETWORKS, WAYS, Settings, bench_latency, latency_table, to_json
    from kronattn.export.runtime import require_onnx
    from kronattn.tables.rendering import to_rich

    chosen = _choices(ways, "--ways", WAYS) if ways else list(WAYS)
    if any(way.startswith("onnxruntime") or way == "int8" for way in chosen):
        require_onnx()
    if output is not None:
        check_writable(output)
    names = [name.strip() for name in models.split(",") if name.strip()] or DEFAULT_NETWORKS
    settings = Settings(threads, batch, size, rounds, turn_seconds)
    latencies = bench_latency(names, chosen, settings, track=lambda each: progress(each, "Measuring"))
    found = to_json(latencies, settings)
    if output is not None:
        write_atomically(output, json_module.dumps(found, indent=2) + "\n")
    if json:
        print_json(found)
        return
    console.print(to_rich(latency_table(latencies, settings), width=console.width))
    console.print(", ".join(f"{name} {value}" for name, value in found["environment"].items()), style="dim")


def _choices(given: str, option: str, known: tuple[str, ...]) -> list[str]:
    chosen = [choice.strip() for choice in given.split(",")]
    for choice in chosen:
        if choice not in known:
            raise ValueError(f"{option} must be {' or '.join(known)}, or several with commas, not {choice!r}")
    return chosen
