"""``kronattn report``: the tables and the theorem on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kronattn.cli.options import Device, Dtype, Json, Quiet, output_file
from kronattn.cli.output import console, print_json, progress, say, write_atomically
from kronattn.extras import require_library

__all__ = ["report"]


def report(
    output: Annotated[
        Path, output_file("--output", "-o", help="Write the page into this file, .html.", suffixes=[".html"])
    ] = Path("out/report.html"),
    device: Device = "cpu",
    dtype: Dtype = "float32",
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes only, in a few seconds.")] = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Recompute the paper's tables, check its theorem, and write both as one self-contained HTML page.

    Prints the tables on the way. Exits with 0 if all checks pass, with 1 if one does not. Takes about a minute.

    Example: kronattn report --output out/report.html
    """
    # Imported here, so that a sub-command loads what it needs and no more.
    from kronattn.measure import describe_environment, resolve_device, resolve_dtype
    from kronattn.present import to_json, to_rich
    from kronattn.report import SECTIONS, Settings, render_page

    settings = Settings(resolve_device(device), resolve_dtype(dtype), quick, progress)
    require_library("matplotlib.figure", "the report")

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
        say(f"Report: {output}")
    if not all(passed.values()):
        raise typer.Exit(1)
