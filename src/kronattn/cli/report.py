"""``kronattn report``: the tables and the theorem on one page."""

from __future__ import annotations

from pathlib import Path

import typer

from kronattn.cli.output import check_writable, console, progress, write_atomically

__all__ = ["report"]


def report(
    output: Path = typer.Option(Path("out/report.html"), help="Write the page into this file, .html."),
    device: str = typer.Option("cpu", help="Where to measure: cpu, cuda, cuda:1."),
    dtype: str = typer.Option("float32", help="float32, float16, bfloat16 or float64."),
    quick: bool = typer.Option(False, "--quick", help="Small sizes only, in a few seconds."),
) -> None:
    """Recompute the paper's tables, check its theorem, and write both as one self-contained HTML page.

    Prints the tables on the way. Exits with 0 if all checks pass, with 1 if one does not. Takes about a minute.

    Example: kronattn report --output out/report.html
    """
    # Imported here, so that a sub-command loads what it needs and no more.
    from kronattn.measure import describe_environment, resolve_device, resolve_dtype
    from kronattn.report import SECTIONS, Settings, render_page
    from kronattn.tables.rendering import require_matplotlib, to_rich

    if output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--output must end in .html, got {output}")
    settings = Settings(resolve_device(device), resolve_dtype(dtype), quick, progress)
    check_writable(output)
    require_matplotlib("the report")

    sections = []
    for section in SECTIONS:
        content = section.build(settings)
        sections.append((section, content))
        for table in content.tables:
            console.print(to_rich(table, width=console.width))
            console.print()
    write_atomically(output, render_page(sections, describe_environment(settings.device, settings.dtype)))
    console.print(f"Report: {output}", highlight=False, markup=False, soft_wrap=True)
    if not all(content.passed for _, content in sections):
        raise typer.Exit(1)
