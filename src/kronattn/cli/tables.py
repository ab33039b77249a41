"""``kronattn tables``: the tables of the paper, recomputed."""

from __future__ import annotations

from pathlib import Path

import typer

from kronattn.cli.output import QUIET_HELP, be_quiet, check_figure, console, print_json, progress, write_figure

__all__ = ["app", "networks", "operators", "segmentation"]

app = typer.Typer(no_args_is_help=True, help="The paper's tables, recomputed beside the printed values.")


@app.command()
def operators(
    device: str = typer.Option("cpu", help="Where to run: auto, cpu, cuda, cuda:1, mps."),
    dtype: str = typer.Option("float32", help="float32, float16, bfloat16 or float64."),
    memory_budget: float | None = typer.Option(
        None, help="Gigabytes; operators that need more are left out. By default 2, or half of a GPU's."
    ),
    quick: bool = typer.Option(False, "--quick", help="Small grids only, in a second or two."),
    quiet: bool = typer.Option(False, "--quiet", "-q", callback=be_quiet, help=QUIET_HELP),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the tables."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Draw a figure into this file, .png or .svg."),
) -> None:
    """Recompute Table 2: what regular, pooled, fused and Kronecker attention cost on one feature map.

    Multiply-adds, memory and time beside the printed values; then larger grids and three axes. Takes about half
    a minute.

    Example: kronattn tables operators --output operators.png
    """
    # Imported here, so that a sub-command loads what it needs and no more.
    from kronattn.measure import resolve_device, resolve_dtype
    from kronattn.present import to_rich
    from kronattn.tables.operators import (
        CASES,
        QUICK_CASES,
        draw_operators,
        measure_operators,
        operator_tables,
        to_json,
    )

    on, of = resolve_device(device), resolve_dtype(dtype)
    if memory_budget is not None and not memory_budget > 0:
        raise ValueError(f"--memory-budget must be positive, got {memory_budget}")
    if output is not None:
        check_figure(output)

    measured = measure_operators(
        QUICK_CASES if quick else CASES,
        device=on,
        dtype=of,
        seconds=0.1 if quick else 4.0,
        memory_budget=None if memory_budget is None else int(memory_budget * 1e9),
        track=lambda cases: progress(cases, "Measuring"),
    )
    if output is not None:
        write_figure(output, draw_operators(measured.rows))
    if json:
        print_json(to_json(measured))
        return
    for table in operator_tables(measured):
        console.print(to_rich(table, width=console.width))
    console.print(", ".join(f"{name} {value}" for name, value in measured.environment.items()), style="dim")
    if output is not None:
        console.print(f"Figure: {output}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def networks(
    quiet: bool = typer.Option(False, "--quiet", "-q", callback=be_quiet, help=QUIET_HELP),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the tables."),
) -> None:
    """Recompute Tables 3, 4 and 5: parameters and multiply-adds of every network.

    Example: kronattn tables networks --json
    """
    from kronattn.present import to_rich
    from kronattn.tables.networks import measure_networks, network_tables, to_json

    measured = measure_networks(track=lambda rows: progress(rows, "Counting"))
    if json:
        print_json(to_json(measured))
        return
    for table in network_tables(measured):
        console.print(to_rich(table, width=console.width))


@app.command()
def segmentation(
    backbone: str = typer.Option("resnet101", help="resnet101 as in the paper, resnet50, resnet18, kanet_kv, ..."),
    sizes: str = typer.Option("321,513", help="Heights and widths of the images, with commas between."),
    batch: int = typer.Option(1, min=1, help="Images in a batch."),
    device: str = typer.Option("cpu", help="Where to run: auto, cpu, cuda, cuda:1, mps."),
    dtype: str = typer.Option("float32", help="float32, float16, bfloat16 or float64."),
    memory_budget: float | None = typer.Option(
        None, help="Gigabytes; heads that need more are left out. By default 4, or half of a GPU's."
    ),
    seconds: float = typer.Option(4.0, min=0.01, help="Time to spend on each size."),
    results: Path | None = typer.Option(
        None, help="What our training runs found. By default results/camvid.json, where it is there."
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", callback=be_quiet, help=QUIET_HELP),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the tables."),
    output: Path | None = typer.Option(None, "--output", "-o", help="Draw a figure into this file, .png or .svg."),
) -> None:
    """Recompute Table 6: DeepLabV2 with ASPP, regular and Kronecker attention, and what each head costs.

    Parameters and multiply-adds are of whole networks, time and memory of the heads by themselves. Takes about half
    a minute.

    Example: kronattn tables segmentation --sizes 321,513 --output heads.png
    """
    from kronattn.bench.heads import parse_sizes
    from kronattn.measure import resolve_device, resolve_dtype
    from kronattn.present import to_rich
    from kronattn.tables.segmentation import (
        Case,
        count_networks,
        draw_heads,
        measure_heads,
        read_results,
        segmentation_tables,
        to_json,
    )

    on, of = resolve_device(device), resolve_dtype(dtype)
    chosen = parse_sizes(sizes)
    if memory_budget is not None and not memory_budget > 0:
        raise ValueError(f"--memory-budget must be positive, got {memory_budget}")
    if output is not None:
        check_figure(output)
    ours = read_results(results)

    counted = count_networks(chosen, backbone=backbone)
    channels, stride = counted[0].channels, counted[0].stride
    costs = measure_heads(
        [Case(size, batch=batch, channels=channels, stride=stride) for size in chosen],
        device=on,
        dtype=of,
        seconds=seconds,
        memory_budget=None if memory_budget is None else int(memory_budget * 1e9),
        track=lambda cases: progress(cases, "Measuring"),
    )
    if output is not None:
        write_figure(output, draw_heads(costs.rows))
    if json:
        print_json(to_json(counted, costs, ours, backbone=backbone))
        return
    for table in segmentation_tables(counted, costs, ours, backbone=backbone):
        console.print(to_rich(table, width=console.width))
    console.print(", ".join(f"{name} {value}" for name, value in costs.environment.items()), style="dim")
    if output is not None:
        console.print(f"Figure: {output}", highlight=False, markup=False, soft_wrap=True)
