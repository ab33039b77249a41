"""Figures as files: the same bytes for the same figure."""

from __future__ import annotations

import io
from typing import Any

from kronattn.extras import require_library

__all__ = ["FIGURE_SUFFIXES", "figure_bytes", "new_figure"]

FIGURE_SUFFIXES = (".png", ".svg")


def new_figure(wanted_by: str, width: float, height: float) -> Any:
    """Return an empty matplotlib figure, of so many inches; or say what to install.

    >>> new_figure("a chart", 4, 3).axes
    []
    """
    matplotlib = require_library("matplotlib.figure", wanted_by)
    return matplotlib.Figure(figsize=(width, height), layout="constrained")


def figure_bytes(figure: Any, kind: str) -> bytes:
    """Return a matplotlib figure as "png" or "svg", the same bytes for the same figure.

    >>> figure_bytes(new_figure("a chart", 1, 1), "png")[1:4]
    b'PNG'
    """
    import matplotlib

    buffer = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "kronattn"}):
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()
