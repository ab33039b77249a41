"""``kronattn train``: a recipe, and what to change in it."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer

from kronattn.cli.options import Data, Quiet, SkipBadImages, accelerator_of
from kronattn.cli.output import print_json, progress, say
from kronattn.cli.threads import use_threads

if TYPE_CHECKING:
    from kronattn.training.progress import Progress
    from kronattn.training.recipe import Recipe

__all__ = ["CONTEXT", "changed_recipe", "train"]

# Everything that is not an option of the command is a setting of the recipe.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def train(
    context: typer.Context,
    config: Path = typer.Option(..., help="The recipe: a YAML file, or the name of ours, such as digits."),
    data: Data = None,
    model: str | None = typer.Option(None, help="The network: one of ours, or timm/NAME."),
    seed: int | None = typer.Option(None, help="Of weights, order and augmentation."),
    device: str | None = typer.Option(None, help="Where to run: auto, cpu, cuda, mps. Default: the recipe's."),
    devices: int | None = typer.Option(None, min=1, help="Processes, one for each device."),
    output: Path | None = typer.Option(
        None, "--output", "-o", help="The run's folder. Default: runs/RECIPE-MODEL-seedN."
    ),
    resume: bool = typer.Option(False, "--resume", help="Continue the run in its folder, if there is one."),
    skip_bad_images: SkipBadImages = False,
    quiet: Quiet = False,
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the summary."),
) -> None:
    """Train a network after a recipe; any setting can be changed with key=value or --key value.

    The run's folder gets checkpoints (last and best), the recipe as used, the history, learning curves, TensorBoard
    logs, the weights as safetensors and a model card.

    Example: kronattn train --config recipes/digits.yaml --model kanet_qkv --seed 1 epochs=5 optimiser.lr=0.05
    """
    from kronattn.tasks import find_task
    from kronattn.training.precompile import precompiling

    named: dict[str, object] = {
        "data.path": data,
        "model.name": model,
        "seed": seed,
        "devices": devices,
        "output": output,
        "threads": context.parent.params.get("threads") if context.parent else None,
        "data.skip_bad_images": "true" if skip_bad_images else None,
    }
    recipe = changed_recipe(config, context.args, named, device)
    with precompiling(recipe):
        # What this imports takes as long as many a kernel to compile.
        result, folder = _run(recipe, config, resume, quiet)
    if not result:
        return  # another process of the same run has it
    if json:
        print_json({**result, "folder": str(folder)})
        return
    task = find_task(recipe.task)
    reached = f"{task.label} {100 * result[task.score]:.2f}% after the last of {result['epochs']} epochs"
    lines = [f"{result['model']} on {result['data']}, seed {result['seed']}: {reached}"]
    if result["best_epoch"] != result["epochs"]:
        best = f"{100 * result[f'best_{task.score}']:.2f}% after epoch {result['best_epoch']}"
        lines.append(f"Best: {best}, whose weights are weights.safetensors; the last's are weights-last.safetensors")
    if result["images_per_second"]:
        waiting = f"{100 * result['waiting_for_data']:.1f}% of the time waiting for data"
        lines.append(f"{result['images_per_second']:,.0f} images a second in training, {waiting}")
    if result.get("skipped_images"):
        lines.append(f"{result['skipped_images']} bad images left out, such as {result['skipped'][0]}")
    say(*lines, f"Run: {folder}")


def _run(recipe: Recipe, config: Path, resume: bool, quiet: bool) -> tuple[dict[str, Any], Path]:
    """The figures of a run, and its folder."""
    from kronattn.training.folder import run_folder
    from kronattn.training.interruption import Interrupted
    from kronattn.training.run import train

    # A run's own copy of its recipe is called after its folder.
    folder = run_folder(recipe, config.parent.name if config.name == "config.yaml" else config.stem)
    recipe = _with_threads(recipe, folder if resume else None)
    shown: Progress = None if quiet else "bar" if sys.stdout.isatty() and sys.stderr.isatty() else "lines"
    try:
        with _nothing_half_written(folder):
            return train(recipe, folder=folder, resume=resume, progress=shown, track=progress), folder
    except (Interrupted, KeyboardInterrupt):
        raise Interrupted(_how_to_go_on(folder)) from None


def _with_threads(recipe: Recipe, resumed: Path | None) -> Recipe:
    """The recipe with the threads that the run computes with: its own, those it began with, or this command's."""
    from kronattn.training.recipe import load_recipe

    before = resumed / "config.yaml" if resumed is not None else None
    if recipe.threads is None and before is not None and before.exists():
        recipe = replace(recipe, threads=load_recipe(before).threads)
    if recipe.threads is not None:
        use_threads(recipe.threads)
    return replace(recipe, threads=torch.get_num_threads())


@contextmanager
def _nothing_half_written(folder: Path) -> Iterator[None]:
    """Take a new run's folder away again where bad input ends it before its first checkpoint."""
    # The folder itself, then those around it that are new with it.
    new = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    except (ValueError, TypeError, OSError, ModuleNotFoundError):
        if new and not (folder / "last.ckpt").exists():
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another run has come into them meanwhile
                for place in new[1:]:
                    place.rmdir()
        raise


def _how_to_go_on(folder: Path) -> str:
    """Where an interrupted run's checkpoint is, and the command that goes on from it."""
    last = folder / "last.ckpt"
    if not last.exists():
        return "interrupted before the first checkpoint: the same command starts again"
    command = ["kronattn", "train", "--config", str(folder / "config.yaml"), "--output", str(folder), "--resume"]
    return f"interrupted; the checkpoint is {last}, and this goes on from it: {shlex.join(command)}"


def changed_recipe(
    config: str | Path, arguments: list[str], named: Mapping[str, object], device: str | None = None
) -> Recipe:
    """A recipe with the settings of a command line, and those of its options that were given."""
    from kronattn.training.recipe import load_recipe

    given = {**named, "accelerator": None if device is None else accelerator_of(device)}
    changes = [f"{key}={value}" for key, value in given.items() if value is not None]
    return load_recipe(config, [*overrides_of(arguments), *changes])


def overrides_of(arguments: list[str]) -> list[str]:
    """Settings as key=value, from ``key=value``, ``--key=value`` and ``--key value``.

    >>> overrides_of(["epochs=3", "--optimiser.lr", "0.1", "--compile=true"])
    ['epochs=3', 'optimiser.lr=0.1', 'compile=true']
    """
    found = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--") and "=" not in argument:
            raise ValueError(f"expected key=value, got {argument!r}")
        if "=" not in argument:
            value = next(rest, None)
            if value is None:
                raise ValueError(f"{argument} needs a value")
            argument = f"{argument}={value}"
        found.append(argument.removeprefix("--"))
    return found
