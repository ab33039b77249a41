"""Predictions as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kronattn.predict.run import Result
from kronattn.present import Cell, Column, Table, tabulate
from kronattn.present.legend import colours_of
from kronattn.tasks import find_task

if TYPE_CHECKING:
    from kronattn.models.files import Description

__all__ = ["results_csv", "results_json", "results_table"]


def results_table(results: Sequence[Result], description: Description) -> Table:
    """One row for each image."""
    share = find_task(description.task).share
    return tabulate(
        f"{description.model}, {description.task}",
        {"image": lambda one: str(one.path), Column(f"classes, with their {share}", numeric=False): _cell},
        results,
    )


def _cell(result: Result) -> Cell:
    if result.error:
        return Cell(result.error, tone="bad")
    return Cell(", ".join(f"{found.name} {found.share:.1%}" for found in result.classes))


def results_json(
    results: Sequence[Result], description: Description, files: Mapping[Path, Mapping[str, str]] | None = None
) -> dict[str, Any]:
    """One JSON object with an entry for each image; a bad file has an ``error`` and no classes. ``files`` are those
    that were written for an image, by what they hold; with them comes a legend of colours."""
    files = files or {}
    names = description.classes
    legend = [
        {"name": name, "label": label, "colour": list(colour)}
        for label, (name, colour) in enumerate(zip(names, colours_of(description, len(names)), strict=True))
    ]
    return {
        "model": description.model,
        "task": description.task,
        **({"legend": legend} if files else {}),
        "images": [
            {
                "image": str(one.path),
                "classes": [{"name": found.name, "share": found.share} for found in one.classes],
                **files.get(one.path, {}),
                **({"error": one.error} if one.error else {}),
            }
            for one in results
        ],
    }


def results_csv(results: Sequence[Result]) -> str:
    """One line for each class of each image: image, rank from 1, class, share, error."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "rank", "class", "share", "error"])
    for one in results:
        if one.error:
            writer.writerow([one.path, "", "", "", one.error])
        for rank, found in enumerate(one.classes, 1):
            writer.writerow([one.path, rank, found.name, f"{found.share:.6f}", ""])
    return text.getvalue()
