"""``kronattn tables``: the tables of the paper, recomputed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kronattn.cli.options import (
    Batch,
    Device,
    Dtype,
    Json,
    MemoryBudget,
    Picture,
    Quiet,
    Seconds,
    Sizes,
    budget_in_bytes,
    show,
    show_tables,
)
from kronattn.cli.output import measuring, progress, write_figure

__all__ = ["app", "networks", "operators", "segmentation"]

app = typer.Typer(no_args_is_help=True, help="The paper's tables, recomputed beside the printed values.")


@app.command()
def operators(
    device: Device = "cpu",
    dtype: Dtype = "float32",
    memory_budget: MemoryBudget = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small grids only, in a second or two.")] = False,
    quiet: Quiet = False,
    json: Json = False,
    output: Picture = None,
) -> None:
    """Recompute Table 2: what regular, pooled, fused and Kronecker attention cost on one feature map.

    Multiply-adds, memory and time beside the printed values; then larger grids and three axes. Takes about half
    a minute.

    Example: kronattn tables operators --output operators.png
    """
    # Imported here, so that a sub-command loads what it needs and no more.
    from kronattn.tables.operators.table import CASES, QUICK_CASES, measure_operators

    cases, seconds = (QUICK_CASES, 0.1) if quick else (CASES, 4.0)
    budget = budget_in_bytes(memory_budget)
    found = measure_operators(cases, device=device, dtype=dtype, seconds=seconds, budget=budget, track=measuring)
    show(found, json=json, figure=output)


@app.command()
def networks(quiet: Quiet = False, json: Json = False) -> None:
    """Recompute Tables 3, 4 and 5: parameters and multiply-adds of every network.

    Example: kronattn tables networks --json
    """
    from kronattn.tables.networks import measure_networks, network_tables, to_json

    found = measure_networks(track=partial(progress, description="Counting"))
    show_tables(network_tables(found), to_json(found) if json else None)


@app.command()
def segmentation(
    backbone: Annotated[str, typer.Option(help="resnet101 as in the paper, resnet50, kanet_kv, ...")] = "resnet101",
    sizes: Sizes = "321,513",
    batch: Batch = 1,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    memory_budget: MemoryBudget = None,
    seconds: Seconds = 4.0,
    results: Annotated[
        Path | None, typer.Option(help="What our training runs found. Default: results/camvid.json, if there.")
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
    output: Picture = None,
) -> None:
    """Recompute Table 6: DeepLabV2 with ASPP, regular and Kronecker attention, and what each head costs.

    Parameters and multiply-adds are of whole networks, time and memory of the heads by themselves. Takes about half
    a minute.

    Example: kronattn tables segmentation --sizes 321,513 --output heads.png
    """
    from kronattn.tables.segmentation.candidates import Case
    from kronattn.tables.segmentation.heads import draw_heads, head_table, measure_heads, parse_sizes
    from kronattn.tables.segmentation.networks import count_networks, network_table, to_json
    from kronattn.tables.segmentation.printed import read_results

    chosen, budget = parse_sizes(sizes), budget_in_bytes(memory_budget)
    ours = read_results(results)
    counted = count_networks(chosen, backbone=backbone)
    channels, stride = counted[0].channels, counted[0].stride
    cases = [Case(size, batch=batch, channels=channels, stride=stride) for size in chosen]
    found = measure_heads(cases, device=device, dtype=dtype, seconds=seconds, budget=budget, track=measuring)
    if output is not None:
        write_figure(output, draw_heads(found))
    payload = {"backbone": backbone, "rows": to_json(counted, ours), "heads": found.to_json()} if json else None
    shown = [network_table(counted, ours, backbone=backbone), head_table(found)]
    show_tables(shown, payload, found.environment, figure=output)
