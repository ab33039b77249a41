"""``kronattn report``: the tables and the theorem on one page."""

from __future__ import annotations

from pathlib import Path

import typer

from kronattn.cli.output import QUIET_HELP, be_quiet, check_writable, console, print_json, progress, write_atomically

__all__ = ["report"]


def report(
    output: Path = typer.Option(
        Path("out/report.html"), "--output", "-o", help="Write the page into this file, .html."
    ),
    device: str = typer.Option("cpu", help="Where to measure: auto, cpu, cuda, cuda:1, mps."),
    dtype: str = typer.Option("float32", help="float32, float16, bfloat16 or float64."),
    quick: bool = typer.Option(False, "--quick", help="Small sizes only, in a few seconds."),
    quiet: bool = typer.Option(False, "--quiet", "-q", callback=be_quiet, help=QUIET_HELP),
    json: bool = typer.Option(False, "--json", help="Print one JSON object instead of the tables."),
) -> None:
    """Recompute the paper's tables, check its theorem, and write both as one self-contained HTML page.

    Prints the tables on the way. Exits with 0 if all checks pass, with 1 if one does not. Takes about a minute.

    Example: kronattn report --output out/report.html
    """
    # Imported here, so that a sub-command loads what it needs and no more.
    from kronattn.measure import describe_environment, resolve_device, resolve_dtype
    from kronattn.present import require_matplotlib, to_json, to_rich
    from kronattn.report import SECTIONS, Settings, render_page

    if output.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--output must end in .html, got {output}")
    settings = Settings(resolve_device(device), resolve_dtype(dtype), quick, progress)
    check_writable(output)
    require_matplotlib("the report")

    sections = []
    for section in SECTIONS:
        content = section.build(settings)
        sections.append((section, content))
        for table in [] if json else content.tables:
            console.print(to_rich(table, width=console.width))
            console.print()
    write_atomically(output, render_page(sections, describe_environment(settings.device, settings.dtype)))
    passed = {section.name: content.passed for section, content in sections}
    if json:
        highlights = [{"value": one.value, "label": one.label} for _, content in sections for one in content.highlights]
        tables = [to_json(table) for _, content in sections for table in content.tables]
        print_json({"output": str(output), "passed": passed, "highlights": highlights, "tables": tables})
    else:
        console.print(f"Report: {output}", highlight=False, markup=False, soft_wrap=True)
    if not all(passed.values()):
        raise typer.Exit(1)
