"""``kronattn bench``: speed against peers, as ratios within one run."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated

import typer

from kronattn.cli.options import (
    Against,
    Batch,
    ChannelsLast,
    Data,
    Device,
    Dtype,
    Figure,
    Json,
    MemoryBudget,
    Models,
    Output,
    Quiet,
    Repeats,
    Rounds,
    Seconds,
    Size,
    Sizes,
    Work,
    budget_in_bytes,
    choices,
    keeping,
    listed,
    required,
    show,
    show_tables,
)
from kronattn.cli.output import console, measuring, print_json, progress, write_json
from kronattn.cli.train import CONTEXT, changed_recipe

__all__ = ["app", "export", "heads", "insert", "latency", "loader", "networks", "operators", "show_files", "training"]

app = typer.Typer(no_args_is_help=True, help="Speed against peers, as ratios within one run.")


@app.command()
def networks(
    models: Models = "",
    device: Device = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 and float16 through autocast.")] = "float32",
    batch: Batch = 16,
    size: Size = 224,
    channels_last: ChannelsLast = False,
    work: Work = "inference,training",
    how: Annotated[str, typer.Option(help="eager, compiled, graphs (CUDA graphs), or several.")] = "eager",
    seconds: Seconds = 8.0,
    processes: Annotated[
        int,
        typer.Option(min=0, help="A process for each network, so many of which compile at a time. 0: one."),
    ] = 0,
    rounds: Rounds = 7,
    repeats: Repeats = 1,
    against: Against = None,
    quiet: Quiet = False,
    json: Json = False,
    output: Output = None,
) -> None:
    """Images a second of our networks against torchvision's and timm's, or against those of another commit.

    Example: kronattn bench networks --batch 1 --work inference --models kanet_kv,kanet_qkv,mobilenetv2
    """
    from kronattn.bench.networks import DEFAULT_NETWORKS, HOWS, WORKS, bench_networks

    found = bench_networks(
        listed(models) or DEFAULT_NETWORKS,
        choices(work, "--work", WORKS),
        choices(how, "--how", HOWS),
        batch=batch,
        size=size,
        device=device,
        dtype=dtype,
        channels_last=channels_last,
        seconds=seconds,
        processes=processes,
        rounds=rounds,
        repeats=repeats,
        against=against,
        track=measuring,
        keep=keeping(output),
    )
    show(found, json=json, output=output)


@app.command()
def operators(
    names: Annotated[str, typer.Option("--operators", help="Comma-separated. Default: all uncompiled ones.")] = "",
    shapes: Annotated[str, typer.Option(help="Like 64x64x56x56, with commas. Default: eight on a GPU, else two.")] = "",
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="Default: bfloat16 on a GPU, else float32.")] = "",
    contiguous: Annotated[bool, typer.Option("--contiguous", help="Positions side by side, not channels.")] = False,
    training: Annotated[bool, typer.Option(help="Measure forward plus backward too.")] = True,
    seconds: Seconds = 0.2,
    repeats: Repeats = 1,
    quiet: Quiet = False,
    json: Json = False,
    output: Output = None,
    figure: Figure = None,
) -> None:
    """What attention operators cost beside a copy of their input: ours, fused, axial, criss-cross, efficient.

    Example: kronattn bench operators --shapes 64x64x56x56 --output operators.json --figure operators.svg
    """
    from kronattn.bench.operators import bench_operators, parse_shapes

    found = bench_operators(
        listed(names) or None,
        parse_shapes(shapes) if shapes else None,
        device=device,
        dtype=dtype or None,
        channels_last=not contiguous,
        training=training,
        seconds=seconds,
        repeats=repeats,
        track=measuring,
        keep=keeping(output),
    )
    show(found, json=json, output=output, figure=figure)


@app.command("show")
def show_files(
    files: Annotated[list[Path], typer.Argument(help="What other commands wrote with --output.")],
    json: Json = False,
    figure: Figure = None,
) -> None:
    """Show what was measured before, as a table and a figure; several files if they are of one machine.

    Example: kronattn bench show results/heads-h200.json --figure heads.svg
    """
    from kronattn.measure import read_comparison

    found = read_comparison(*files)
    try:
        show(found, json=json, figure=figure)
    except (KeyError, TypeError) as error:
        # Each kind of comparison has its own cases and settings, which tables and figures look into.
        raise ValueError(f"{', '.join(map(str, files))} is not whole: {error}") from None


@app.command(context_settings=CONTEXT)
def loader(
    context: typer.Context,
    config: Annotated[str, typer.Option(help="The recipe: a YAML file, or the name of ours.")],
    data: Data = None,
    epochs: Annotated[int, typer.Option(min=2, help="Epochs of each kind; the first is left out.")] = 4,
    quiet: Quiet = False,
    json: Json = False,
    output: Output = None,
) -> None:
    """Whether data holds training back: images a second with a recipe's data, and with one batch again and again.

    Example: kronattn bench loader --config digits
    """
    from kronattn.bench.loader import bench_loader

    recipe = changed_recipe(config, context.args, {"data.path": data})
    found = bench_loader(recipe, epochs=epochs, track=progress)
    if output is not None:
        write_json(output, found)
    if json:
        print_json(found)
        return
    speed = f"{found['images_per_second']:,.0f} images a second"
    share = f"{100 * found['kept']:.1f}% of the {found['without_data']:,.0f} without data"
    console.print(f"{found['model']} on {found['data']} at {found['size']} px: {speed}, {share}", highlight=False)


@app.command()
def heads(
    names: Annotated[str, typer.Option(help="Comma-separated: aspp, attn, attn_fused, kao_kv, kao_qkv.")] = "",
    sizes: Sizes = "321,513,1025",
    channels: Annotated[int, typer.Option(min=1, help="Channels of the features: ResNet's 2048.")] = 2048,
    stride: Annotated[int, typer.Option(min=1, help="Output stride of the features.")] = 8,
    classes: Annotated[int, typer.Option(min=1, help="Classes.")] = 21,
    batch: Batch = 1,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    channels_last: ChannelsLast = False,
    work: Work = "inference",
    how: Annotated[str, typer.Option(help="eager, graphs (CUDA graphs), or both.")] = "eager",
    seconds: Seconds = 4.0,
    memory_budget: MemoryBudget = None,
    rounds: Rounds = 7,
    against: Against = None,
    quiet: Quiet = False,
    json: Json = False,
    output: Output = None,
    figure: Figure = None,
) -> None:
    """What segmentation heads cost by themselves, beyond the features: ASPP, regular and Kronecker attention.

    Example: kronattn bench heads --device cuda --dtype bfloat16 --channels-last --batch 8 --output heads.json
    """
    from kronattn.tables.segmentation.candidates import HEADS, Case
    from kronattn.tables.segmentation.heads import HOWS, WORKS, measure_heads, parse_sizes

    found = measure_heads(
        [Case(size, batch, channels, stride, classes) for size in parse_sizes(sizes)],
        listed(names) or tuple(HEADS),
        works=choices(work, "--work", WORKS),
        hows=choices(how, "--how", HOWS),
        device=device,
        dtype=dtype,
        channels_last=channels_last,
        with_resize=True,
        seconds=seconds,
        budget=budget_in_bytes(memory_budget),
        rounds=rounds,
        against=against,
        track=measuring,
        keep=keeping(output),
    )
    show(found, json=json, output=output, figure=figure)


@app.command()
def export(
    models: Models = "mobilenetv2,kanet_kv,kanet_qkv",
    runtimes: Annotated[str, typer.Option(help="Which of the three.")] = "eager,compiled,onnxruntime",
    batch: Batch = 1,
    size: Size = 224,
    seconds: Annotated[float, typer.Option(min=0.01, help="Of timing; capturing takes longer.")] = 20.0,
    quiet: Quiet = False,
    json: Json = False,
    output: Output = None,
) -> None:
    """Latency on the CPU of PyTorch eager, torch.compile and onnxruntime, KANet against MobileNetV2.

    It is `kronattn bench latency` with other defaults.

    Example: kronattn bench export --runtimes eager,onnxruntime --output latency.json
    """
    from kronattn.bench.latency import bench_latency

    chosen = choices(runtimes, "--runtimes", ("eager", "compiled", "onnxruntime"))
    names = required(models, "--models")
    rounds = 10
    found = bench_latency(
        names,
        chosen,
        batch=batch,
        size=size,
        rounds=rounds,
        turn_seconds=seconds / len(chosen) / len(names) / rounds,
        track=measuring,
        keep=keeping(output),
    )
    show(found, json=json, output=output)


@app.command()
def latency(
    models: Models = "",
    ways: Annotated[str, typer.Option(help="Some of the ways below, with commas. Default: all that are there.")] = "",
    batch: Batch = 1,
    size: Size = 224,
    rounds: Rounds = 20,
    turn_seconds: Annotated[float, typer.Option(min=0.0, help="Seconds of a turn; three calls at least.")] = 0.1,
    repeats: Repeats = 1,
    quiet: Quiet = False,
    json: Json = False,
    output: Output = None,
) -> None:
    """How long one image takes on the CPU, over mobilenetv2 run in the same way, by turns.

    Ways: eager, fused (kronattn.fuse), compiled (torch.compile of that), onnxruntime, onnxruntime-dynamic (any size),
    int8, and operators, which compares Kronecker attention with PyTorch's fused attention. With kronattn-cpu installed
    also eager-native, fused-native, compiled-native and operators-native; the others do without it.

    Example: kronattn bench latency --ways fused,onnxruntime --threads 1 --output latency.json
    """
    from kronattn.bench.latency import DEFAULT_NETWORKS, WAYS, bench_latency, default_ways

    chosen = choices(ways, "--ways", WAYS) if ways else default_ways()
    names = listed(models) or DEFAULT_NETWORKS
    found = bench_latency(
        names,
        chosen,
        batch=batch,
        size=size,
        rounds=rounds,
        turn_seconds=turn_seconds,
        repeats=repeats,
        track=measuring,
        keep=keeping(output),
    )
    show(found, json=json, output=output)


@app.command()
def insert(
    examples: Annotated[Path, typer.Option(help="The guide's examples, in a checkout.")] = Path("docs/examples"),
    seconds: Seconds = 10.0,
    quiet: Quiet = False,
    json: Json = False,
    output: Output = None,
) -> None:
    """What attention adds to other people's networks: the examples of the guide with it and without it, on the CPU.

    Example: kronattn bench insert --output insert.json
    """
    from kronattn.bench.insert import bench_insert

    show(bench_insert(examples, seconds=seconds, track=measuring), json=json, output=output)


@app.command()
def training(
    imagenette: Annotated[str, typer.Option(help="Where Imagenette lies: a pattern of .tar files.")] = "",
    camvid: Annotated[str, typer.Option(help="Where CamVid lies.")] = "",
    parts: Annotated[
        str, typer.Option(help="Of whole, compare, camvid, speeds, steps, seeds, before; in this order.")
    ] = "whole,compare,camvid,speeds,steps,seeds,before",
    until: Annotated[float, typer.Option(help="Seconds after which no further part begins.")] = 570,
    epochs: Annotated[int, typer.Option(min=1, help="Of Imagenette's runs.")] = 60,
    compare_epochs: Annotated[int, typer.Option(min=1, help="Of the comparison's runs.")] = 12,
    jobs: Annotated[int, typer.Option(min=1, help="Runs of the comparison side by side.")] = 4,
    settings: Annotated[list[str], typer.Option(help="Of every run, for a trial: accelerator=cpu.")] = [],  # noqa: B006
    quiet: Quiet = False,
    json: Json = False,
    output: Output = None,
) -> None:
    """Training on a GPU from start to weights, by the wall clock of whole commands, and where a step's time goes.

    The file is written after every part: a run that is cut short leaves what it has.

    Example: kronattn bench training --imagenette 'imagenette-144-*.tar' --camvid camvid.tar --output training.json
    """
    from kronattn.bench.training import Wanted, bench_training, goals
    from kronattn.present import tabulate

    wanted = Wanted(imagenette, camvid, epochs, compare_epochs, jobs, settings)
    found: dict[str, object] = {}
    for so_far in bench_training(wanted, parts.split(","), until=until):
        if not quiet:
            name, part = list(so_far.items())[-1]
            typer.echo(f"--- {name}: {json_module.dumps(part, indent=1)[:3000]}", err=True)
        found = {"command": " ".join(["kronattn", *sys.argv[1:]]), **so_far}
        if output is not None:
            write_json(output, found, indent=1)
    table = tabulate("Training", {"": lambda row: row[0], "found": lambda row: row[1]}, goals(found))
    show_tables([table], found if json else None)
