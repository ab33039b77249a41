"""``kronattn compare``: networks beside each other, with as many seeds as it takes to tell them apart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kronattn.cli.options import Data, Json, TakeTurns, figure_file, listed, required, show_tables
from kronattn.cli.output import check_writable, say, write_figure, write_json
from kronattn.cli.train import changed_recipe

__all__ = ["compare"]


def compare(
    context: typer.Context,
    config: Path = typer.Option(..., help="The recipe for all: a YAML file, or the name of ours."),
    models: str = typer.Option(..., help="Comma-separated: our names, timm/NAME."),
    contexts: str = typer.Option(
        "",
        "--context",
        help="Comma-separated layers, each in the place of the networks' attention: none, kao_qkv:positions=learned.",
    ),
    seeds: str = typer.Option("0-2", help="Numbers and ranges: 0-4, or 0,2,5."),
    baseline: str = typer.Option("", help="Differences are taken to this network. Default: the first."),
    data: Data = None,
    device: str | None = typer.Option(None, help="Where to run: auto, cpu, cuda, mps. Default: the recipe's."),
    jobs: int = typer.Option(
        1, min=1, help="Processes that train side by side. Images a second are then left to --alone."
    ),
    take_turns: TakeTurns = False,
    alone: int = typer.Option(
        0, min=0, help="Epochs, from 2, that each network trains by itself in the end, for its speed."
    ),
    folder: Path | None = typer.Option(None, help="The runs' folder. Default: runs/compare-RECIPE."),
    output: Path | None = typer.Option(None, "--output", "-o", help="The JSON file. Default: results/DATA.json."),
    figure: Annotated[
        Path | None, figure_file("--figure", help="Draw the comparison into this file, .png or .svg.")
    ] = None,
    quiet: bool = typer.Option(False, "--quiet", "-q", help="No line for each run; failures are told."),
    json: Json = False,
) -> None:
    """Train each network with each seed under one recipe; print means, spreads, and paired differences.

    Stopped and started again, it goes on where it was. Any setting can be changed with key=value or --key value.

    Example: kronattn compare --config recipes/digits.yaml --models mobilenetv2,kanet_kv --seeds 0-4 epochs=5
    """
    from kronattn.tables.training import comparison_table, draw_comparison
    from kronattn.tasks import find_task
    from kronattn.training.comparison import check_data, measure_alone, parse_seeds, plan, run_all, summarise
    from kronattn.training.folder import read_result
    from kronattn.training.recipe import recipe_yaml, without_places

    if alone == 1:
        raise ValueError("--alone must be at least 2: the first epoch warms up and does not count")
    recipe = changed_recipe(config, context.args, {"data.path": data}, device)
    place = folder or Path(f"runs/compare-{config.stem}")
    target = check_writable(output or Path(f"results/{recipe.data.name}.json"))
    plans = plan(recipe, required(models, "--models"), parse_seeds(seeds), place, listed(contexts))
    labels = list(dict.fromkeys(one.recipe.model.label for one in plans))
    baseline = baseline or labels[0]
    if baseline not in labels:
        raise ValueError(f"--baseline {baseline} is not among --models {', '.join(labels)}")

    if recipe.devices * recipe.nodes > 1:
        raise ValueError(
            f"runs of a comparison have one device each, not devices {recipe.devices} and nodes {recipe.nodes}"
        )
    task = find_task(recipe.task)

    def report(one: Any, result: dict[str, Any]) -> None:
        if not quiet:
            typer.echo(f"{one.name}: {100 * result[task.score]:.2f}%", err=True)

    if any(read_result(one.folder) is None for one in plans):
        check_data(recipe)
    results, failures = run_all(plans, jobs=jobs, take_turns=take_turns, on_result=report)
    for name, failure in failures.items():
        typer.echo(f"{name} failed: {failure}", err=True)
    if not any(result["model"] == baseline for result in results):
        raise ValueError(f"no run of the baseline {baseline} came to its end: there is nothing to compare with")
    done = {result["model"] for result in results}
    speeds = measure_alone([one for one in plans if one.recipe.model.label in done], alone) if alone else None
    found = {
        "task": recipe.task,
        "data": recipe.data.name,
        "score": task.score,
        "label": task.label,
        "baseline": baseline,
        "jobs": jobs,
        "alone": speeds,
        "summary": summarise(results, baseline, task.score, speeds),
        "runs": results,
        "recipe": recipe_yaml(without_places(recipe)),
        "environment": results[0]["environment"],
    }
    write_json(target, found)
    if figure is not None:
        write_figure(figure, draw_comparison(found))
    show_tables([comparison_table(found)], found if json else None)
    if not json:
        say(f"Results: {target}")
    if failures:
        raise typer.Exit(1)
