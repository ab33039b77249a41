"""A study as one page of HTML: its rules, and for each data set tables, findings and figures, in one file."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from kronattn.present import figure_bytes, to_html
from kronattn.study.figures import draw_costs, draw_gains
from kronattn.study.summary import summarise_study
from kronattn.study.tables import overview_table, part_table, sweep_table
from kronattn.study.words import advice, findings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["study_page"]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #1a202c; }
.table { overflow-x: auto; } table { border-collapse: collapse; margin: 1rem 0; font-size: 0.9rem; }
caption { text-align: left; font-weight: 600; padding: 0.3rem 0; } th, td { padding: 0.2rem 0.7rem; text-align: left; }
thead th { border-bottom: 1px solid #a0aec0; } .number { text-align: right; font-variant-numeric: tabular-nums; }
.good { color: #2f855a; font-weight: 600; } .bad { color: #c53030; font-weight: 600; }
.notes { color: #4a5568; font-size: 0.85rem; } img { max-width: 100%; }
"""


def study_page(found: Mapping[str, Any]) -> str:
    """What :class:`kronattn.study.records.Records` writes, for readers."""
    study, summary = found["study"], summarise_study(found)
    parts = [f"<h1>{escape(study['title'])}</h1>", "<h2>The rules, written before the runs</h2>", "<ul>"]
    parts += [f"<li>{escape(rule)}</li>" for rule in study["rules"]]
    parts += ["</ul>", f"<p>{escape(_machines(found))}</p>"]
    references = [name for name in study["references"] if any(name in part["references"] for part in summary)]
    if any(entry["differences"] for part in summary for entry in part["layers"]):
        parts.append(to_html(overview_table([part for part in summary if part["runs"]], references[0])))
        parts.append(_image(draw_gains(summary, references), "What each layer gains, with 95% intervals"))
    if references and (costs := draw_costs(summary, found["costs"], references[0])) is not None:
        parts.append(_image(costs, "Gain against cost"))
    for part in summary:
        parts += [f"<h2>{escape(part['title'])}</h2>", f"<p><strong>{escape(advice(part))}</strong></p>"]
        parts += [f"<p>{escape(sentence)}</p>" for sentence in findings(part)]
        parts.append(to_html(part_table(part, found["costs"])))
        if (sweep := sweep_table(part)) is not None:
            parts.append(to_html(sweep))
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(study["title"])}</title>\n'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n<body>\n{body}\n'
        "</body></html>\n"
    )


def _machines(found: Mapping[str, Any]) -> str:
    devices = sorted({one["device"] for one in found["environments"] if one.get("device")})
    hours = sum(run["seconds"] for run in found["runs"]) / 3600
    names = ", ".join(devices) or "nothing yet"
    return f"{len(found['runs'])} runs, {hours:.1f} hours of them in all, many at once, on: {names}."


def _image(figure: Figure, description: str) -> str:
    encoded = base64.b64encode(figure_bytes(figure, "png")).decode()
    return f'<p><img alt="{escape(description)}" src="data:image/png;base64,{encoded}"></p>'
