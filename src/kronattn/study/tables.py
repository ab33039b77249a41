"""A study's tables: one of all data sets, one for each, and one of what learning rates were tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kronattn.present import Cell, Column, Group, Table

__all__ = ["overview_table", "part_table", "sweep_table"]

_TONES = {"better": "good", "worse": "bad"}
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
            rows.append([Cell(layer), *(_difference(gain)[0] for gain in gains)])
    references = {part["references"][0] for part in summary}
    titles, points = [part["title"] for part in summary], f"Points over {', '.join(references)}."
    if len(references) > 1:
        # Said once where it is the same for all: long headings make a wide table.
        titles, points = [f"{part['title']}: over {part['references'][0]}" for part in summary], "In points."
    columns = (Column("Layer", numeric=False), *map(Column, titles))
    notes = [f"{points} ‡ and †: zero is excluded, after Holm's correction and without it."]
    return Table("What each layer gains", columns, [Group("", rows)], notes)


def part_table(part: Mapping[str, Any], costs: Mapping[str, Any] | None = None) -> Table:
    """Every layer on one data set: its test score, its difference to each reference, and its cost where measured."""
    devices = list((costs or {}).get(part["name"], {}).values())
    columns = (
        Column("Layer", numeric=False),
        Column("Runs"),
        Column(f"Test {part['score_label']}, %"),
        *(column for name in part["references"] for column in (Column(f"Over {name}"), Column("95% interval"))),
        Column("Learning rate"),
        Column("MAdd"),
        *(Column(f"ms, {device['name']}") for device in devices),
    )
    rows = [
        [
            Cell(entry["layer"]),
            Cell(f"{entry['runs']}" + (f" ({len(entry['failures'])} failed)" if entry["failures"] else "")),
            Cell(_score(entry)),
            *(cell for name in part["references"] for cell in _difference(entry["differences"].get(name))),
            Cell(", ".join(f"{rate:g}" for rate in entry["learning_rates"]) or "–"),
            Cell(f"{entry['madd']:,}" if entry["madd"] else "–"),
            *(Cell(_milliseconds(device["layers"].get(entry["layer"]))) for device in devices),
        ]
        for entry in part["layers"]
    ]
    return Table(part["title"], columns, [Group("", rows)], _notes(part, devices))


def _notes(part: Mapping[str, Any], devices: Sequence[Mapping[str, Any]]) -> list[str]:
    missing = part["planned"] - part["runs"]
    notes = [
        f"Mean ± standard deviation of the test scores after the last epoch. Differences are in points, paired by "
        f"{part['paired_by']}, with Student's 95% interval; ‡ where zero stays excluded after Holm's correction for "
        f"the {part['comparisons']} comparisons of this table, † where it is so without it."
    ]
    if missing > 0:
        notes.append(f"{missing} of {part['planned']} planned runs are missing.")
    failures = [failure for entry in part["layers"] for failure in entry["failures"]]
    notes += [f"Failed: {failure}" for failure in failures]
    notes += [f"{device['name']}: {device['how']}." for device in devices]
    return notes


def sweep_table(part: Mapping[str, Any]) -> Table | None:
    """The validation scores that chose the learning rates; none where there was nothing to choose."""
    if not part["sweep"]:
        return None
    rates = sorted({entry["lr"] for entry in part["sweep"]})
    layers = list(dict.fromkeys(entry["layer"] for entry in part["sweep"]))
    rows = []
    for layer in layers:
        cells = []
        for rate in rates:
            found = [one for one in part["sweep"] if (one["layer"], one["lr"]) == (layer, rate)]
            scores = [one["validation"] for one in found if one["failure"] is None]
            text = f"{100 * sum(scores) / len(scores):.2f}" if scores else "failed" if found else "–"
            cells.append(Cell(text))
        rows.append([Cell(layer), *cells])
    columns = (Column("Layer", numeric=False), *(Column(f"{rate:g}") for rate in rates))
    folds = {entry["fold"] for entry in part["sweep"]}
    notes = [f"The mean over {len(folds)} folds."] if len(folds) > 1 else []
    return Table(
        f"{part['title']}: validation {part['score_label']}, %, by learning rate", columns, [Group("", rows)], notes
    )


def _score(entry: Mapping[str, Any]) -> str:
    if entry["mean"] is None:
        return "–"
    return f"{100 * entry['mean']:.2f}" + (f" ± {100 * entry['std']:.2f}" if entry["std"] is not None else "")


def _difference(found: Mapping[str, Any] | None) -> tuple[Cell, Cell]:
    if found is None:
        return Cell("–"), Cell("–")
    mark = _MARKS.get(found["verdict"], "")
    tone = _TONES.get(found["verdict"], "")
    interval = "–" if found["low"] is None else f"{100 * found['low']:+.2f} to {100 * found['high']:+.2f}"
    return Cell(f"{100 * found['mean']:+.2f}{mark}", tone=tone), Cell(interval)


def _milliseconds(cost: Mapping[str, Any] | None) -> str:
    return "–" if cost is None else f"{1e3 * cost['seconds']:.3g}"
