"""``kronattn list``: what can be asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from kronattn.cli.options import Json, show_tables

__all__ = ["app", "context", "models", "recipes", "weights"]

app = typer.Typer(
    no_args_is_help=True,
    help="What can be asked for by name: networks, recipes, weights, context layers. Example: kronattn list models",
)


@app.command()
def models(
    task: Annotated[str | None, typer.Option(help="classification, segmentation or volumes. Default: all.")] = None,
    json: Json = False,
) -> None:
    """The networks, what each is for, and whether weights come with it.

    Example: kronattn list models --task segmentation
    """
    from kronattn.models.registry import list_models, packaged_names, task_of

    packaged = packaged_names()
    rows = [{"name": name, "task": task_of(name), "weights": name in packaged} for name in list_models(task)]
    told: dict[str, Any] = {"network": "name", "task": "task", "": lambda row: "with weights" if row["weights"] else ""}
    _show({"models": rows}, told, rows, json)


@app.command()
def recipes(json: Json = False) -> None:
    """The recipes that `kronattn train --config NAME` knows, and what each is for.

    Example: kronattn list recipes
    """
    from kronattn.training.recipe import list_recipes

    rows = [{"name": name, "about": about} for name, about in list_recipes().items()]
    _show({"recipes": rows}, {"recipe": "name", "about": "about"}, rows, json)


@app.command()
def context(json: Json = False) -> None:
    """The context layers that networks, heads and `kronattn compare --context NAME` take.

    Example: kronattn list context
    """
    from kronattn.nn.context_registry import list_contexts

    names = list_contexts()
    _show({"context": names}, {"context layer": "name"}, [{"name": name} for name in names], json)


@app.command()
def weights(json: Json = False) -> None:
    """The trained networks that come with the package, and what they know.

    Example: kronattn list weights
    """
    from kronattn.models.files import read_description
    from kronattn.models.registry import packaged_names, packaged_weights

    rows = []
    for name in packaged_names():
        about = read_description(packaged_weights(name))
        assert about is not None
        rows.append({"name": name, **{key: getattr(about, key) for key in ("task", "data", "size", "classes")}})
    told = {"weights": "name", "task": "task", "trained on": "data", "pixels": "size"}
    _show({"weights": rows}, {**told, "classes": lambda row: ", ".join(row["classes"])}, rows, json)


def _show(
    found: dict[str, Any],
    told: Mapping[str, str | Callable[[Any], str]],
    rows: Sequence[Mapping[str, Any]],
    json: bool,
) -> None:
    """A column for each heading: a key of the rows, or a function of one."""
    from kronattn.present import Column, tabulate

    def cell(what: str | Callable[[Any], str]) -> Callable[[Any], str]:
        return (lambda row: str(row[what])) if isinstance(what, str) else what

    columns = {Column(title, numeric=False): cell(what) for title, what in told.items()}
    show_tables([tabulate("", columns, rows)], found if json else None)
