"""``kronattn theorem``: Theorem 1 of the paper and the equations before it, checked."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from kronattn.cli.output import check_writable, console, print_json, progress, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kronattn.distributions import Check

__all__ = ["figure_bytes", "render", "theorem", "to_json"]

_SUFFIXES = (".png", ".svg")


def theorem(
    height: Annotated[int, typer.Option(help="Rows of the feature maps, h.")] = 5,
    width: Annotated[int, typer.Option(help="Columns of the feature maps, w.")] = 7,
    samples: Annotated[int, typer.Option(help="Samples of each random matrix.")] = 20_000,
    confidence: Annotated[
        float, typer.Option(help="Probability that all sampled checks pass if the theorem is true.")
    ] = 0.999,
    seed: Annotated[int, typer.Option(help="Seed of the model's parameters and of the samples.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="Draw a figure into this file, .png or .svg.", show_default=False)
    ] = None,
) -> None:
    """Check Theorem 1 and each equation before it: exactly where it can be, by sampling where not.

    Exits with 0 if all checks pass, with 1 if one does not.

    Example: kronattn theorem --height 6 --width 6 --output theorem.png
    """
    # torch takes a second to import, and `kronattn --help` does without it.
    from kronattn.distributions import check_theorem, draw_samples, draw_theorem, random_setting

    if output is not None:
        if output.suffix.lower() not in _SUFFIXES:
            raise ValueError(f"--output must end in {' or '.join(_SUFFIXES)}, got {output}")
        check_writable(output)
        _check_matplotlib()
    if not 0 < confidence < 1:
        raise ValueError(f"--confidence must be between 0 and 1, both excluded, got {confidence}")

    setting = random_setting(height, width, seed=seed)
    drawn = draw_samples(setting, samples, seed=seed, track=lambda blocks: progress(blocks, "Sampling"))
    checks = check_theorem(setting, drawn, confidence=confidence)
    if output is not None:
        write_atomically(output, figure_bytes(draw_theorem(setting, drawn), output.suffix.lower()[1:]))

    settings: dict[str, Any] = {
        "height": height,
        "width": width,
        "samples": samples,
        "confidence": confidence,
        "seed": seed,
        "output": None if output is None else str(output),
    }
    if json:
        print_json(to_json(checks, settings))
    else:
        console.print(render(checks, confidence=confidence, samples=samples))
        if output is not None:
            console.print(f"Figure: {output}", highlight=False, markup=False, soft_wrap=True)
    if not all(check.passed for check in checks):
        raise typer.Exit(1)


def render(checks: Sequence[Check], *, confidence: float, samples: int) -> Table:
    """Return the checks as a table, a green tick or a red cross for each.

    >>> from kronattn.distributions import Check
    >>> check = Check("mean of X", "Eq. 3", "exact", "relative error", 3e-16, 1e-12)
    >>> render([check], confidence=0.999, samples=20_000).row_count
    1
    """
    passed = sum(check.passed for check in checks)
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=f"Theorem 1: {passed} of {len(checks)} checks pass",
        caption=(
            "exact: relative error against dense linear algebra in float64\n"
            f"sampled: {samples:,} samples; true statements all pass with probability {confidence:g} or more\n"
            "χ²: squared distance from the claim; KS: gap between distribution functions"
        ),
    )
    table.add_column("Check")
    table.add_column("Equation", no_wrap=True)
    table.add_column("How", no_wrap=True)
    table.add_column("Measured", justify="right", no_wrap=True)
    table.add_column("Bound", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for check in checks:
        mark = "[green]✓[/green]" if check.passed else "[red]✗[/red]"
        how = check.kind if check.kind == "exact" else f"{check.kind} {check.statistic}"
        measured, bound = _number(check.measured), _number(check.bound)
        # rich reads square brackets as markup, and the names of Eqs. 8 and 9 have them.
        table.add_row(escape(check.name), check.equation, how, measured, bound, mark)
    return table


def to_json(checks: Iterable[Check], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the checks as one JSON object.

    >>> from kronattn.distributions import Check
    >>> check = Check("mean of X", "Eq. 3", "exact", "relative error", 3e-16, 1e-12)
    >>> to_json([check], {"seed": 0})["all_passed"]
    True
    """
    checks = list(checks)
    return {
        "checks": [
            {
                "name": check.name,
                "equation": check.equation,
                "kind": check.kind,
                "statistic": check.statistic,
                # JSON has no NaN and no infinity.
                "measured": check.measured if math.isfinite(check.measured) else None,
                "bound": check.bound,
                "passed": check.passed,
            }
            for check in checks
        ],
        "all_passed": all(check.passed for check in checks),
        "settings": settings,
    }


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """Return a figure as PNG or SVG, the same bytes for the same figure.

    >>> from matplotlib.figure import Figure
    >>> figure_bytes(Figure(figsize=(1, 1)), "png")[1:4]
    b'PNG'
    """
    import matplotlib

    buffer = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "kronattn"}):
        figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
    return buffer.getvalue()


def _check_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "--output needs matplotlib: pip install 'kronattn[plots]'", name=missing.name
        ) from None


def _number(value: float) -> str:
    return f"{value:.1e}" if value != 0 and abs(value) < 1e-3 else f"{value:.4g}"
