"""Options that several sub-commands have, each said once; and how what was measured is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kronattn.cli.output import be_quiet, check_writable, console, print_json, say, write_figure, write_json
from kronattn.extras import require_library
from kronattn.measure import resolve_device
from kronattn.present import FIGURE_SUFFIXES

if TYPE_CHECKING:
    from kronattn.measure import Comparison
    from kronattn.present import Table

__all__ = [
    "WEIGHTS_HELP",
    "Against",
    "Batch",
    "ChannelsLast",
    "Data",
    "Device",
    "Dtype",
    "Figure",
    "Json",
    "MemoryBudget",
    "Models",
    "Output",
    "Picture",
    "Quiet",
    "Repeats",
    "Rounds",
    "Seconds",
    "Size",
    "Sizes",
    "SkipBadImages",
    "TakeTurns",
    "Weights",
    "Work",
    "accelerator_of",
    "budget_in_bytes",
    "choices",
    "figure_file",
    "given_network",
    "keeping",
    "listed",
    "output_file",
    "required",
    "show",
    "show_tables",
]

WEIGHTS_HELP = "The trained network: a file, a run's folder, or a name from `kronattn list weights`."


def output_file(*flags: str, help: str, suffixes: Sequence[str] = (), drawn: bool = False) -> Any:
    """An option for a file to write: refused before any work is done where that could not be."""

    def check(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is not None:
            option = max(parameter.opts, key=len)
            if suffixes and path.suffix.lower() not in (*suffixes, *([".htm"] if ".html" in suffixes else [])):
                listed = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}" if suffixes[1:] else suffixes[0]
                raise ValueError(f"{option} must end in {listed}, got {path}")
            check_writable(path, option)
            if drawn:
                require_library("matplotlib.figure", option)
        return path

    return typer.Option(*flags, help=help, callback=check)


def figure_file(*flags: str, help: str = "Draw a figure into this file, .png or .svg.") -> Any:
    """An option for a figure to draw."""
    return output_file(*flags, help=help, suffixes=FIGURE_SUFFIXES, drawn=True)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=be_quiet, help="No progress bar.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")]
Output = Annotated[Path | None, output_file("--output", "-o", help="Write the JSON object into this file too.")]
Figure = Annotated[Path | None, figure_file("--figure")]
# The same where a command writes nothing else.
Picture = Annotated[Path | None, figure_file("--output", "-o")]
Weights = Annotated[str, typer.Option("--weights", "-w", help=WEIGHTS_HELP)]
Data = Annotated[str | None, typer.Option("--data", help="Where the images lie: a folder, a .tar, a pattern.")]
SkipBadImages = Annotated[bool, typer.Option("--skip-bad-images", help="Leave them out and count them.")]
TakeTurns = Annotated[
    bool,
    typer.Option("--take-turns", help="Have processes take turns on a GPU, without NVIDIA's multi-process service."),
]
Models = Annotated[str, typer.Option(help="Comma-separated: our names, torchvision/NAME, timm/NAME. Default: several.")]
Size = Annotated[int, typer.Option(min=32, help="Height and width of the images.")]
Sizes = Annotated[str, typer.Option(help="Heights and widths of the images, with commas.")]
Work = Annotated[str, typer.Option(help="inference, training, or both.")]
Seconds = Annotated[float, typer.Option(min=0.001, help="Of timing for each case and way of running.")]
Repeats = Annotated[int, typer.Option(min=1, help="Runs of everything, one after another: rows hold their medians.")]
Rounds = Annotated[int, typer.Option(min=1, help="Turns of each candidate, where it has a process.")]


def _source_tree(checkout: Path | None) -> Path | None:
    from kronattn.measure.processes import source_tree

    return None if checkout is None else source_tree(checkout)


Against = Annotated[
    Path | None, typer.Option(callback=_source_tree, help="Another checkout, which takes part, in processes.")
]
Device = Annotated[str, typer.Option(help="Where to run: auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")]
Batch = Annotated[int, typer.Option(min=1, help="Images in a batch.")]
ChannelsLast = Annotated[bool, typer.Option("--channels-last", help="Keep channels side by side in memory.")]
MemoryBudget = Annotated[
    float | None, typer.Option(help="Gigabytes; what needs more is left out. By default 2 or 4, or half of a GPU's.")
]


def given_network(argument: str | None, weights: str | None) -> str:
    """The network, which some commands take as an argument, too.

    >>> given_network(None, "kanet_kv")
    'kanet_kv'
    """
    if argument is not None and weights is not None:
        raise ValueError(f"give the network once: {argument} or --weights {weights}")
    found = weights if argument is None else argument
    if found is None:
        raise ValueError("--weights is missing: a file, a run's folder, or a name from `kronattn list weights`")
    return found


def accelerator_of(device: str) -> str:
    """Lightning's word for a device.

    >>> accelerator_of("cpu"), accelerator_of("auto")
    ('cpu', 'auto')
    """
    if device == "auto":
        return device
    kind = resolve_device(device).type
    return "gpu" if kind == "cuda" else kind


def listed(given: str) -> list[str]:
    """Names with commas between.

    >>> listed("kanet_kv, kanet_qkv")
    ['kanet_kv', 'kanet_qkv']
    """
    return [name.strip() for name in given.split(",") if name.strip()]


def required(given: str, option: str) -> list[str]:
    """Names with commas between, one at least.

    >>> required("kanet_kv, kanet_qkv", "--models")
    ['kanet_kv', 'kanet_qkv']
    """
    if not (names := listed(given)):
        raise ValueError(f"{option} must name one at least, with commas between, not {given!r}")
    return names


def choices(given: str, option: str, known: Iterable[str]) -> list[str]:
    """Several of the known ones, with commas between.

    >>> choices("a, b", "--letters", "abc")
    ['a', 'b']
    """
    chosen = [choice.strip() for choice in given.split(",")]
    for choice in chosen:
        if choice not in known:
            raise ValueError(f"{option} must be {' or '.join(known)}, or several with commas, not {choice!r}")
    return chosen


def budget_in_bytes(gigabytes: float | None) -> int | None:
    """What --memory-budget says."""
    if gigabytes is not None and not gigabytes > 0:
        raise ValueError(f"--memory-budget must be positive, got {gigabytes}")
    return None if gigabytes is None else int(gigabytes * 1e9)


def keeping(output: Path | None) -> Callable[[Comparison], None]:
    """What writes a comparison into --output while it is measured: a run that is cut short leaves what it has."""

    def keep(found: Comparison) -> None:
        if output is not None:
            write_json(output, found.to_json())

    return keep


def show(found: Comparison, *, json: bool, output: Path | None = None, figure: Path | None = None) -> None:
    """A comparison as its files, and as JSON or tables on standard output."""
    from kronattn.bench.shown import draw, tables

    if output is not None:
        write_json(output, found.to_json())
    if figure is not None:
        write_figure(figure, draw(found))
    payload = found.to_json() if json else None
    show_tables([] if json else tables(found), payload, found.environment, figure=figure)


def show_tables(
    tables: Iterable[Table],
    payload: Any = None,
    environment: dict[str, Any] | None = None,
    *,
    figure: Path | None = None,
) -> None:
    """A payload as JSON where there is one, else tables, what they were measured with, and where the figure is."""
    from kronattn.present import to_rich

    if payload is not None:
        print_json(payload)
        return
    for table in tables:
        console.print(to_rich(table, width=console.width))
    if environment:
        console.print(", ".join(f"{name} {value}" for name, value in environment.items()), style="dim")
    if figure is not None:
        say(f"Figure: {figure}")
