"""A study's tables: one of all data sets; for each its scores, its prices, and what learning rates were tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kronattn.present import NOTHING, Cell, Column, Group, Table, tabulate

__all__ = ["cost_table", "overview_table", "part_table", "sweep_table"]

_TONES = {"better": "good", "worse": "bad"}
# Narrow columns break a cell between its figure and its interval, not within either.
_SPACE = "\N{NO-BREAK SPACE}"
# Not stars, which mean something else in Markdown.
_MARKS = {"better": "‡", "worse": "‡", "maybe better": "†", "maybe worse": "†"}


def overview_table(summary: Sequence[Mapping[str, Any]]) -> Table:
    """What every layer gains on every data set over its first reference, in points."""
    layers = list(dict.fromkeys(entry["layer"] for part in summary for entry in part["layers"]))
    rows = []
    for layer in layers:
        gains = [
            next((x["differences"].get(part["references"][0]) for x in part["layers"] if x["layer"] == layer), None)
            for part in summary
        ]
        if any(gains):
            rows.append([Cell(layer), *map(_difference, gains)])
    references = {part["references"][0] for part in summary}
    titles, points = [part["title"] for part in summary], f"Points over {', '.join(references)}."
    if len(references) > 1:
        # Said once where it is the same for all: long headings make a wide table.
        titles, points = [f"{part['title']}: over {part['references'][0]}" for part in summary], "In points."
    columns = (Column("Layer", numeric=False), *map(Column, titles))
    notes = [
        f"{points} ‡: shown, since the 95% interval excludes zero also after Holm's correction. †: maybe, without that "
        "correction alone. No mark: no difference was shown."
    ]
    return Table("What each layer gains", columns, [Group("", rows)], notes)


def part_table(part: Mapping[str, Any]) -> Table:
    """Every layer on one data set: its test score, and its difference to each reference."""
    columns = (
        Column("Layer", numeric=False),
        Column("Runs"),
        Column(f"Test {part['score_label']}, %"),
        *(Column(f"Over {name}") for name in part["references"]),
    )
    rows = [
        [
            Cell(entry["layer"]),
            Cell(f"{entry['runs']}" + (f" ({len(entry['failures'])} failed)" if entry["failures"] else "")),
            Cell(_score(entry)),
            *(_difference(entry["differences"].get(name), interval=True) for name in part["references"]),
        ]
        for entry in part["layers"]
    ]
    return Table(part["title"], columns, [Group("", rows)], _notes(part))


def cost_table(part: Mapping[str, Any], costs: Mapping[str, Any]) -> Table:
    """What every layer took on one data set: the learning rate that was chosen for it, multiply-adds, and time where
    it was measured."""
    devices = list(costs.get(part["name"], {}).values())
    columns: dict[str, Callable[[Any], str | None]] = {
        "Layer": lambda entry: entry["layer"],
        "Learning rate": lambda entry: ", ".join(f"{rate:g}" for rate in entry["learning_rates"]) or None,
        "MAdd": lambda entry: f"{entry['madd'] / 1e6:,.1f}m" if entry["madd"] else None,
    }
    for device in devices:
        columns[f"ms, {device['name']}"] = partial(_milliseconds, device["layers"])
    notes = [f"{device['name']}: {device['how']}." for device in devices]
    if notes:
        notes.append("Times of two tables were measured at different hours: they compare within one table alone.")
    return tabulate(f"{part['title']}: cost", columns, part["layers"], notes=notes)


def _notes(part: Mapping[str, Any]) -> list[str]:
    missing, count = part["planned"] - part["runs"], part["comparisons"]
    comparisons = "one comparison" if count == 1 else f"{count} comparisons"
    notes = [
        f"Mean ± standard deviation of the test scores after the last epoch. Differences are in points, paired by "
        f"{part['paired_by']}, with Student's 95% interval. ‡: it excludes zero, also after Holm's correction for the "
        f"{comparisons} of this table. †: without that correction alone."
    ]
    if missing > 0:
        notes.append(f"{missing} of {part['planned']} planned runs are missing.")
    failures = [failure for entry in part["layers"] for failure in entry["failures"]]
    notes += [f"Failed: {failure}" for failure in failures]
    return notes


def sweep_table(part: Mapping[str, Any]) -> Table | None:
    """The validation scores that chose the learning rates; none where there was nothing to choose."""
    if not part["sweep"]:
        return None
    rates = sorted({entry["lr"] for entry in part["sweep"]})
    layers = list(dict.fromkeys(entry["layer"] for entry in part["sweep"]))
    rows, most = [], 0
    for layer in layers:
        cells = []
        for rate in rates:
            found = [one for one in part["sweep"] if (one["layer"], one["lr"]) == (layer, rate)]
            scores = [one["validation"] for one in found if one["failure"] is None]
            text = f"{100 * sum(scores) / len(scores):.2f}" if scores else "failed" if found else "–"
            if scores and len(scores) < len(found):
                text += f", {len(found) - len(scores)} failed"
            cells.append(Cell(text))
            most = max(most, len(found))
        rows.append([Cell(layer), *cells])
    columns = (Column("Layer", numeric=False), *(Column(f"{rate:g}") for rate in rates))
    notes = [f"The mean over {most} runs."] if most > 1 else []
    return Table(
        f"{part['title']}: validation {part['score_label']}, %, by learning rate", columns, [Group("", rows)], notes
    )


def _score(entry: Mapping[str, Any]) -> str:
    if entry["mean"] is None:
        return NOTHING
    return f"{100 * entry['mean']:.2f}" + ("" if entry["std"] is None else f"{_SPACE}±{_SPACE}{100 * entry['std']:.2f}")


def _difference(found: Mapping[str, Any] | None, *, interval: bool = False) -> Cell:
    """In points, with its mark and, where asked for, its interval."""
    if found is None:
        return Cell(NOTHING)
    text = f"{100 * found['mean']:+.2f}{_MARKS.get(found['verdict'], '')}"
    if interval and found["low"] is not None:
        text += f" ({100 * found['low']:+.2f}{_SPACE}to{_SPACE}{100 * found['high']:+.2f})"
    return Cell(text, tone=_TONES.get(found["verdict"], ""))


def _milliseconds(layers: Mapping[str, Any], entry: Mapping[str, Any]) -> str | None:
    cost = layers.get(entry["layer"])
    return None if cost is None else f"{1e3 * cost['seconds']:.3g}"
