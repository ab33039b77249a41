"""What training runs found, for readers: networks beside each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kronattn.present import Cell, Column, Table, new_figure, tabulate
from kronattn.present.charts import tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["comparison_table", "draw_comparison"]


def comparison_table(found: Mapping[str, Any]) -> Table:
    """Networks that were trained alike, with what seeds do to them and how they differ from the baseline.

    ``found`` is what ``kronattn compare`` writes.
    """
    columns: dict[str | Column, Callable[[Any], Cell | str | None]] = {
        "Network": lambda row: row["model"],
        "Seeds": lambda row: str(row["runs"]),
        f"{found['label']}, %": _mean_and_spread,
        "Pixels right, %": lambda row: _or_none(row.get("pixel_accuracy"), lambda share: f"{100 * share:.2f}"),
        "Difference": lambda row: _or_none(row["difference"], lambda it: f"{100 * it['mean']:+.2f}"),
        "95% interval": lambda row: _interval(row["difference"]),
        "Params": lambda row: f"{row['parameters']:,}",
        "MAdd": lambda row: f"{row['madd']:,}",
        "Images/s": lambda row: _or_none(row["images_per_second"] or None, lambda speed: f"{speed:,.0f}"),
        "Waiting": lambda row: _or_none(row.get("waiting_for_data"), lambda share: f"{share:.1%}"),
        "Peak MB": lambda row: _or_none(row.get("peak_bytes"), lambda count: f"{count / 1e6:,.0f}"),
    }
    shared = not found.get("alone") and any(run.get("jobs", 1) > 1 for run in found["runs"])
    waiting = all(row.get("waiting_for_data") is not None for row in found["summary"])
    notes = [
        "Mean ± standard deviation over seeds, after the last epoch. Differences are "
        f"to {found['baseline']}, paired by seed, in points; the interval is Student's. Params with batch norm's.",
        *(["Waiting: the share of the time of training in which the next batch was waited for."] if waiting else []),
        *(["Several runs shared the device: there is no telling images a second."] if shared else []),
    ]
    return tabulate(f"{found['data']}: one recipe for all", columns, found["summary"], notes=notes)


def draw_comparison(found: Mapping[str, Any]) -> Figure:
    """Every run as a point, every network's mean and standard deviation beside its points."""
    summary = found["summary"]
    figure = new_figure("the comparison's figure", 8, 0.6 + 0.5 * len(summary))
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
    tidy(axis, "x")
    return figure


def _mean_and_spread(row: Mapping[str, Any]) -> str:
    spread = f" ± {100 * row['std']:.2f}" if row["std"] is not None else ""
    return f"{100 * row['mean']:.2f}{spread}"


def _interval(found: Mapping[str, Any] | None) -> str | None:
    if found is None or found["low"] is None:
        return None
    return f"{100 * found['low']:+.2f} to {100 * found['high']:+.2f}"


def _or_none(value: Any, form: Callable[[Any], str]) -> str | None:
    return None if value is None else form(value)
