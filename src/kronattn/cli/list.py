"""``kronattn list``: what can be asked for by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from kronattn.cli.output import console, print_json

__all__ = ["app", "context", "models", "recipes", "weights"]

app = typer.Typer(
    no_args_is_help=True,
    help="What can be asked for by name: networks, recipes, weights, context layers. Example: kronattn list models",
)


@app.callback()
def _list() -> None: ...


@app.command()
def models(
    task: str | None = typer.Option(None, help="classification, segmentation or volumes. Default: all."),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """The networks, what each is for, and whether weights come with it.

    Example: kronattn list models --task segmentation
    """
    from kronattn.models.registry import list_models, packaged_names, task_of

    packaged = packaged_names()
    rows: list[dict[str, Any]] = [
        {"name": name, "task": task_of(name), "weights": name in packaged} for name in list_models(task)
    ]
    shown = [(row["name"], row["task"], "with weights" if row["weights"] else "") for row in rows]
    _show({"models": rows}, ("network", "task", ""), shown, json)


@app.command()
def recipes(
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """The recipes that `kronattn train --config NAME` knows, and what each is for.

    Example: kronattn list recipes
    """
    from kronattn.training.recipe import list_recipes

    found = list_recipes()
    rows = [{"name": name, "about": about} for name, about in found.items()]
    _show({"recipes": rows}, ("recipe", "about"), list(found.items()), json)


@app.command()
def context(
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """The context layers that networks, heads and `kronattn compare --context NAME` take.

    Example: kronattn list context
    """
    from kronattn.nn.context_registry import list_contexts

    names = list_contexts()
    _show({"context": names}, ("context layer",), [(name,) for name in names], json)


@app.command()
def weights(
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the table."),
) -> None:
    """The trained networks that come with the package, and what they know.

    Example: kronattn list weights
    """
    from kronattn.models.files import read_description
    from kronattn.models.registry import packaged_names, packaged_weights

    rows: list[dict[str, Any]] = []
    for name in packaged_names():
        about = read_description(packaged_weights(name))
        assert about is not None
        rows.append(
            {"name": name, "task": about.task, "data": about.data, "size": about.size, "classes": about.classes}
        )
    shown = [(row["name"], row["task"], row["data"], str(row["size"]), ", ".join(row["classes"])) for row in rows]
    _show({"weights": rows}, ("weights", "task", "trained on", "pixels", "classes"), shown, json)


def _show(found: dict[str, object], heads: Sequence[str], rows: Sequence[Sequence[str]], json: bool) -> None:
    if json:
        print_json(found)
        return
    from kronattn.present import Cell, Column, Group, Table, to_rich

    columns = [Column(head, numeric=False) for head in heads]
    table = Table("", columns, [Group("", [[Cell(text) for text in row] for row in rows])])
    console.print(to_rich(table, width=console.width))
