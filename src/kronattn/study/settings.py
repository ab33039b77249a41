"""A study's file: what is compared, on what, and by which rules, all of it said before the first run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kronattn.names import near_names
from kronattn.nn.context_registry import parse_context
from kronattn.study.checks import check_kinds
from kronattn.tasks import Task, find_task
from kronattn.training.comparison import parse_seeds
from kronattn.training.recipe import Recipe, load_recipe, read_yaml, shipped

__all__ = ["Layer", "Part", "Study", "load_study"]


@dataclass(frozen=True)
class Layer:
    """A context layer of the study: one of ``kronattn.nn.list_contexts()``, with options."""

    name: str
    context: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """One data set with one network.

    Args:
        name: what results call it.
        recipe: the same for all layers: a file, or the name of one that comes with kronattn.
        path: the data's, below the folder that the command is given.
        layers: names of those that take part.
        title: what readers call it; ``name`` by default.
        settings: changes to the recipe, in its own structure.
        seeds: of the runs that count, such as "0-4".
        seeds_of: other seeds for some layers.
        folds: those that are tested in turn, where the data has folds.
        learning_rates: each layer's is chosen among these, by validation; one alone is taken as it is.
        sweep_seeds: of the runs that choose, by each learning rate's mean. Not among ``seeds``: those runs count, these
            do not.
        sweep_folds: which of the folds choose: "each" for itself, or "first" for all.
        prepared: the size that ``--prepare`` scales pictures to, height and width; as they are by default.
        caveat: why the figures decide less than they seem to; said in the place of advice.
    """

    name: str
    recipe: str
    path: str
    layers: Sequence[str]
    title: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: str = "0-4"
    seeds_of: Mapping[str, str] = field(default_factory=dict)
    folds: Sequence[int] = ()
    learning_rates: Sequence[float] = ()
    sweep_seeds: str = "100"
    sweep_folds: str = "each"
    prepared: Sequence[int] = ()
    caveat: str = ""

    def __post_init__(self) -> None:
        where = f"data.{self.name}"
        for layer in self.seeds_of:
            if layer not in self.layers:
                raise ValueError(f"{where}.seeds_of: {layer} is not among its layers: {', '.join(self.layers)}")
        counting = {seed for layer in self.layers for seed in self.seeds_for(layer)}
        if both := [seed for seed in self.seeds_that_choose if seed in counting]:
            raise ValueError(f"{where}.sweep_seeds: {both[0]} is among its seeds: runs that choose cannot count")

    def seeds_for(self, layer: str) -> list[int]:
        """The seeds of a layer's runs that count."""
        return parse_seeds(str(self.seeds_of.get(layer, self.seeds)))

    @property
    def seeds_that_choose(self) -> list[int]:
        return parse_seeds(str(self.sweep_seeds))

    def sources(self, data: Path) -> list[Path]:
        """Where its data lie below a folder, or that folder; not to be there is an error. Data that a package holds lie
        nowhere."""
        if not self.path:
            return []
        # The folder itself has a name without parts, and no pattern.
        found = sorted(data.glob(self.path)) if Path(self.path).parts else [data]
        if not found:
            raise FileNotFoundError(f"there is no {data / self.path} for data.{self.name}")
        return found

    @cached_property
    def base(self) -> Recipe:
        """The recipe before a layer, a seed, a fold and a learning rate are put into it."""
        try:
            recipe = load_recipe(self.recipe, list(_overrides(self.settings)))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"data.{self.name}.recipe: {error}") from None
        except ValueError as error:
            raise ValueError(f"data.{self.name}, its recipe and settings: {error}") from None
        if self.folds and not hasattr(recipe.data.images, "fold"):
            raise ValueError(f"data.{self.name}.folds are for spectrograms, and {self.recipe} is for {recipe.task}")
        if recipe.devices * recipe.nodes > 1:
            raise ValueError(
                f"data.{self.name}: runs of a study have one device each, not devices {recipe.devices} and nodes "
                f"{recipe.nodes}"
            )
        return recipe

    @property
    def task(self) -> Task:
        return find_task(self.base.task)

    @property
    def score(self) -> str:
        """The figure by which layers are judged."""
        return self.task.score

    @property
    def label(self) -> str:
        return self.title or self.name


@dataclass(frozen=True)
class Study:
    """A whole study; ``references`` are the layers that all others are compared with."""

    name: str
    title: str
    rules: Sequence[str]
    layers: Mapping[str, Layer]
    references: Sequence[str]
    parts: Sequence[Part]

    def chosen(self, names: Sequence[str]) -> Study:
        """The study with some of its data sets alone."""
        known = [part.name for part in self.parts]
        for name in names:
            if name not in known:
                raise ValueError(f"--only {name}: {near_names(name, known)}")
        return replace(self, parts=[part for part in self.parts if part.name in names]) if names else self


def load_study(path: str | Path) -> Study:
    """Read a study's file, or one that comes with kronattn, by its name.

    A study may name another that it ``extends``, and give what differs alone; its ``data`` are then those that it
    names.
    """
    place = _place(path)
    written = _read(place)
    for key in ("rules", "layers", "data"):
        if not written.get(key):
            raise ValueError(f"{place}: {key} is missing: a study says its rules, its layers and its data")
    layers = {name: _layer(name, entry, place) for name, entry in written["layers"].items()}
    references = list(written.get("references", ("none",)))
    _check_names(references, layers, f"{place}: references")
    parts = [_part(name, entry, list(layers), place) for name, entry in written["data"].items()]
    return Study(place.stem, written.get("title", place.stem), list(written["rules"]), layers, references, parts)


def _place(path: str | Path) -> Path:
    if Path(path).is_file():
        return Path(path)
    known = shipped("studies")
    if str(path) not in known:
        raise FileNotFoundError(f"there is no study {path}: {near_names(str(path), known)}")
    return known[str(path)]


def _layer(name: str, entry: Mapping[str, Any] | None, path: Path) -> Layer:
    found = entry or {}
    context = found.get("context", name)
    try:
        parse_context(context)
    except ValueError as error:
        raise ValueError(f"{path}: layers.{name}: {error}") from None
    return Layer(name, context, dict(found.get("options") or {}))


def _part(name: str, entry: Mapping[str, Any], layers: Sequence[str], path: Path) -> Part:
    for key in ("recipe", "path"):
        if key not in entry:
            raise ValueError(f"{path}: data.{name}.{key} is missing")
    chosen = list(entry.get("layers", layers))
    _check_names(chosen, layers, f"{path}: data.{name}.layers")
    rates = [float(rate) for rate in entry.get("learning_rates", ())]
    try:
        return Part(**{**entry, "name": name, "layers": chosen, "learning_rates": rates})
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_names(names: Iterable[str], layers: Collection[str], where: str) -> None:
    for name in names:
        if name not in layers:
            raise ValueError(f"{where}: {name!r} is not among layers: {near_names(name, layers)}")


def _read(path: Path, above: Sequence[Path] = ()) -> dict[str, Any]:
    """A study's file over the one that it extends; ``above`` are those that led here."""
    found = read_yaml(path, "study")
    check_kinds(found, path)
    if "extends" not in found:
        return found
    chain = [*above, path.resolve()]
    other = path.parent / found["extends"]
    if other.resolve() in chain:
        raise ValueError(
            f"{path}: extends must be another study's file, not {found['extends']}, which extends this one"
        )
    base = _read(other, chain)
    known = base.get("data", {})
    data = {name: {**known.get(name, {}), **(entry or {})} for name, entry in found.get("data", {}).items()}
    return {**base, **found, "data": data or known}


def _overrides(settings: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Changes to a recipe as ``key=value``; free-form options are one value."""
    for key, value in settings.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping) and name != "model.options":
            yield from _overrides(value, f"{name}.")
        else:
            yield f"{name}={value if isinstance(value, str) else json.dumps(value)}"
