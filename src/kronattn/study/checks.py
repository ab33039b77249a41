"""What each key of a study's file must hold: all of it is checked before anything is merged, read or run."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kronattn.names import near_names
from kronattn.training.comparison import parse_seeds

__all__ = ["check_kinds"]


class _Kind(NamedTuple):
    """What a key must hold, in words, and whether a value is that."""

    words: str
    fits: Callable[[Any], bool]


def check_kinds(found: Mapping[str, Any], path: Path) -> None:
    """Refuse keys that a study's file does not have, and values that they cannot have, naming file and key."""
    _check_entries(found, _TOP, f"{path}: ")
    for number, rule in enumerate(found.get("rules", ()), start=1):
        _check(rule, _RULE, f"{path}: rules, number {number},")
    for name, entry in found.get("layers", {}).items():
        _check(name, _NAME, f"{path}: a name in layers")
        _check(entry, _LAYER, f"{path}: layers.{name}")
    for name, entry in found.get("data", {}).items():
        _check(name, _NAME, f"{path}: a name in data")
        if entry is None and "extends" in found:
            continue
        _check(entry, _MAPPING, f"{path}: data.{name}")
        _check_entries(entry, _PART, f"{path}: data.{name}.")


def _check_entries(found: Mapping[str, Any], kinds: Mapping[str, _Kind], where: str) -> None:
    for key, value in found.items():
        if key not in kinds:
            place, _, above = where.partition(": ")
            raise ValueError(f"{place}: unknown key {f'{above}{key}'!r}: {near_names(str(key), kinds)}")
        _check(value, kinds[key], f"{where}{key}")


def _check(value: Any, kind: _Kind, where: str) -> None:
    if not kind.fits(value):
        raise ValueError(f"{where} must be {kind.words}, not {'null' if value is None else reprlib.repr(value)}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_whole(value: Any) -> bool:
    # YAML's true is Python's 1.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_height_and_width(value: Any) -> bool:
    # Of none, pictures are as they are.
    return isinstance(value, list) and len(value) in (0, 2) and all(_is_whole(side) and side > 0 for side in value)


def _is_rate(value: Any) -> bool:
    # YAML 1.1 reads 1e-3 as text.
    try:
        return not isinstance(value, bool) and 0 < float(value) < math.inf
    except (TypeError, ValueError):
        return False


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and not Path(value).is_absolute()


def _are_seeds(value: Any) -> bool:
    try:
        return isinstance(value, str | int) and not isinstance(value, bool) and bool(parse_seeds(str(value)))
    except ValueError:
        return False


def _are_seeds_by_layer(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_name(name) and _are_seeds(seeds) for name, seeds in value.items())


def _each(fits: Callable[[Any], bool], least: int = 0) -> Callable[[Any], bool]:
    """Whether a value is a list of so many at least, all different, that fit."""

    def all_fit(value: Any) -> bool:
        if not isinstance(value, list) or len(value) < least or not all(map(fits, value)):
            return False
        return len({float(one) if fits is _is_rate else one for one in value}) == len(value)

    return all_fit


def _is_layer(value: Any) -> bool:
    if value is None:
        return True
    if not isinstance(value, Mapping) or not set(value) <= {"context", "options"}:
        return False
    return _is_name(value.get("context", "none")) and isinstance(value.get("options"), Mapping | None)


_TEXT = _Kind("text", _is_text)
_NAME = _Kind("text, not empty", _is_name)
_RULE = _Kind("text, in quotes where it holds ': '", _is_name)
_MAPPING = _Kind("keys and values", lambda value: isinstance(value, Mapping))
_ENTRIES = _Kind("names, each with what belongs to it", lambda value: isinstance(value, Mapping))
_LAYER = _Kind("empty, or a context by its name and options by theirs", _is_layer)
_NAMES = _Kind("a list of layers' names, one at least and each once", _each(_is_name, 1))
_SEEDS = _Kind("numbers and ranges such as 0-4 or 0,2,5, each number once", _are_seeds)

_TOP = {
    "title": _TEXT,
    "rules": _Kind("a list of sentences, one at least", lambda value: isinstance(value, list) and value != []),
    "layers": _ENTRIES,
    "references": _NAMES,
    "data": _ENTRIES,
    "extends": _Kind("the path of another study's file", _is_name),
}
_PART = {
    "recipe": _Kind("a recipe's file or name", _is_name),
    "path": _Kind("a path below the folder of all data, or '' for data that a package holds", _is_path),
    "layers": _NAMES,
    "title": _TEXT,
    "settings": _MAPPING,
    "seeds": _SEEDS,
    "seeds_of": _Kind("layers' names, each with its seeds, such as 0-4", _are_seeds_by_layer),
    "folds": _Kind("a list of whole numbers, each once", _each(_is_whole)),
    "learning_rates": _Kind("a list of numbers above 0, each once", _each(_is_rate)),
    "sweep_seeds": _SEEDS,
    "sweep_folds": _Kind("'each' or 'first'", lambda value: value in ("each", "first")),
    "prepared": _Kind("a height and a width in pixels", _is_height_and_width),
    "caveat": _TEXT,
}
