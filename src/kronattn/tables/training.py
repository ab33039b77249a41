"""What training runs found, for readers: networks beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kronattn.present import Cell, Column, Group, Table, require_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["comparison_table", "draw_comparison"]


def comparison_table(found: Mapping[str, Any], notes: Sequence[str] = ()) -> Table:
    """Networks that were trained alike, with what seeds do to them and how they differ from the baseline.

    ``found`` is what ``kronattn compare`` writes.
    """
    pixels, memory, waiting = (
        all(row.get(key) is not None for row in found["summary"])
        for key in ("pixel_accuracy", "peak_bytes", "waiting_for_data")
    )
    columns = (
        Column("Network", numeric=False),
        Column("Seeds"),
        Column(f"{found['label']}, %"),
        *([Column("Pixels right, %")] if pixels else []),
        Column("Difference"),
        Column("95% interval"),
        Column("Params"),
        Column("MAdd"),
        Column("Images/s"),
        *([Column("Waiting")] if waiting else []),
        *([Column("Peak MB")] if memory else []),
    )
    rows = [
        [
            Cell(row["model"]),
            Cell(str(row["runs"])),
            Cell(_mean_and_spread(row)),
            *([Cell(f"{100 * row['pixel_accuracy']:.2f}")] if pixels else []),
            *_difference(row["difference"]),
            Cell(f"{row['parameters']:,}"),
            Cell(f"{row['madd']:,}"),
            Cell(f"{row['images_per_second']:,.0f}" if row["images_per_second"] else "–"),
            *([Cell(f"{row['waiting_for_data']:.1%}")] if waiting else []),
            *([Cell(f"{row['peak_bytes'] / 1e6:,.0f}")] if memory else []),
        ]
        for row in found["summary"]
    ]
    notes = [
        "Mean ± standard deviation over seeds, after the last epoch. Differences are "
        f"to {found['baseline']}, paired by seed, in points; the interval is Student's. Params with batch norm's.",
        *(["Waiting: the share of the time of training in which the next batch was waited for."] if waiting else []),
        *(["Several runs shared the device: there is no telling images a second."] if _shared(found) else []),
        *notes,
    ]
    return Table(f"{found['data']}: one recipe for all", columns, [Group("", rows)], notes)


def _shared(found: Mapping[str, Any]) -> bool:
    return not found.get("alone") and any(run.get("jobs", 1) > 1 for run in found["runs"])


def draw_comparison(found: Mapping[str, Any]) -> Figure:
    """Every run as a point, every network's mean and standard deviation beside its points."""
    require_matplotlib("the comparison's figure")
    from matplotlib.figure import Figure

    summary = found["summary"]
    figure = Figure(figsize=(8, 0.6 + 0.5 * len(summary)), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(reversed(summary)):
        scores = [100 * run[found["score"]] for run in found["runs"] if run["model"] == row["model"]]
        axis.plot(scores, [place] * len(scores), "o", color="#a0aec0", markersize=6, alpha=0.9, zorder=2)
        spread = 100 * row["std"] if row["std"] else 0
        axis.errorbar(100 * row["mean"], place + 0.2, xerr=spread, fmt="D", color="#2b6cb0", capsize=4, zorder=3)
    axis.set_yticks(range(len(summary)), [row["model"] for row in reversed(summary)])
    axis.set_ylim(-0.6, len(summary) - 0.2)
    axis.set_xlabel(f"validation {found['label']}, %")
    axis.set_title(f"{found['data']}: one recipe for all", fontsize=11)
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _mean_and_spread(row: Mapping[str, Any]) -> str:
    spread = f" ± {100 * row['std']:.2f}" if row["std"] is not None else ""
    return f"{100 * row['mean']:.2f}{spread}"


def _difference(found: Mapping[str, Any] | None) -> tuple[Cell, Cell]:
    if found is None:
        return Cell("–"), Cell("–")
    interval = "–" if found["low"] is None else f"{100 * found['low']:+.2f} to {100 * found['high']:+.2f}"
    return Cell(f"{100 * found['mean']:+.2f}"), Cell(interval)
