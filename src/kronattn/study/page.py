"""A study as one page of HTML: its rules, and for each data set tables, findings and figures, in one file."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from kronattn.present import embedded_figure, html_page, to_html
from kronattn.study.figures import draw_costs, draw_gains
from kronattn.study.summary import summarise_study
from kronattn.study.tables import cost_table, overview_table, part_table, sweep_table
from kronattn.study.words import advice, findings

__all__ = ["study_page"]


def study_page(found: Mapping[str, Any]) -> str:
    """What :class:`kronattn.study.records.Records` writes, for readers."""
    study, summary = found["study"], summarise_study(found)
    parts = ["<h2>The rules, written before the runs</h2>", "<ul>"]
    parts += [f"<li>{escape(rule)}</li>" for rule in study["rules"]]
    parts += ["</ul>", f"<p>{escape(_machines(found))}</p>"]
    references = [name for name in study["references"] if any(name in part["references"] for part in summary)]
    if any(entry["differences"] for part in summary for entry in part["layers"]):
        parts.append(to_html(overview_table([part for part in summary if part["runs"] and part["references"]])))
        drawn = draw_gains(summary, references)
        parts.append(embedded_figure(drawn, "What each layer gains, with 95% intervals", "png"))
    if references and (costs := draw_costs(summary, found["costs"], references[0])) is not None:
        parts.append(embedded_figure(costs, "Gain against cost", "png"))
    for part in summary:
        parts += [f"<h2>{escape(part['title'])}</h2>", f"<p><strong>{escape(advice(part))}</strong></p>"]
        parts += [f"<p>{escape(sentence)}</p>" for sentence in findings(part)]
        parts += [to_html(part_table(part)), to_html(cost_table(part, found["costs"]))]
        if (sweep := sweep_table(part)) is not None:
            parts.append(to_html(sweep))
    return html_page(study["title"], [f"<h1>{escape(study['title'])}</h1>"], parts)


def _machines(found: Mapping[str, Any]) -> str:
    devices = sorted({one["device"] for one in found["environments"] if one.get("device")})
    hours = sum(run["seconds"] for run in found["runs"]) / 3600
    names = ", ".join(devices) or "nothing yet"
    return f"{len(found['runs'])} runs, {hours:.1f} hours of them in all, many at once, on: {names}."
