from __future__ import annotations

import sys

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from kronattn.extras import require_library
from kronattn.present import (
    Cell,
    Column,
    Group,
    Table,
    figure_bytes,
    format_percent,
    format_ratio,
    format_significant,
    to_html,
    to_rich,
)

TABLE = Table(
    "Costs & <savings>",
    [Column("Name", numeric=False), Column("MB")],
    [Group("8×14²×8", [[Cell("a[b]"), Cell("2.46", "5.2MB")], [Cell("other"), Cell("1.50")]])],
    ["One note."],
)


def shown(width, table=TABLE):
    console = Console(width=width, file=None, record=True)
    with console.capture() as capture:
        console.print(to_rich(table, width=width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_terminal_puts_the_printed_value_beside_ours_or_below():
    assert any("a[b]" in line and "2.46 5.2MB" in line for line in shown(80))
    narrow = shown(14)
    assert any(line.endswith("2.46") for line in narrow)
    assert any(line.strip() == "5.2MB" for line in narrow)


@pytest.mark.parametrize("width", [200, 80, 60, 40])
def test_no_figure_is_cut_off_in_a_narrow_terminal(width):
    """Names with several words, figures with spaces, and more columns than fit."""
    figures = ["59.87 ± 0.30", "+0.26 to +2.93", "11,379,308", "20,060,040,384", "1,234", "709"]
    names = ["deeplabv2_aspp", "KAO_KV of ours"]
    table = Table(
        "Title",
        [Column("Network", numeric=False), *(Column(f"{at} and more") for at in range(len(figures)))],
        [Group("all of them", [[Cell(name), *map(Cell, figures)] for name in names])],
        ["One note."],
    )
    lines = shown(width, table)
    assert not any("…" in line for line in lines)
    assert max(map(len, lines)) <= width
    for name in names:
        rows = [line for line in lines if line.startswith(name)]
        assert len(rows) == sum(line.startswith("Network") for line in lines)
        assert all(any(figure in row for row in rows) for figure in figures)
    assert sum("Title" in line for line in lines) == sum("One note." in line for line in lines) == 1


def test_html_is_escaped_and_aligned():
    html = to_html(TABLE)
    assert "Costs &amp; &lt;savings&gt;" in html
    assert '<td class="number" data-label="MB">2.46<span class="printed">5.2MB</span></td>' in html
    assert '<td class="number" data-label="MB">1.50<span class="printed"></span></td>' in html
    assert '<th scope="rowgroup" colspan="2">8×14²×8</th>' in html
    assert '<td data-label="Name">other</td>' in html
    assert "One note." in html


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_figures_are_reproducible(kind):
    def draw():
        figure = Figure(figsize=(2, 2))
        figure.subplots().plot([1, 2], [3, 1], "o-")
        return figure_bytes(figure, kind)

    first = draw()
    assert first == draw()
    assert first.startswith(b"\x89PNG" if kind == "png" else b"<?xml")


def test_formats():
    assert format_percent(1.0) == "100.00%"
    assert format_percent(0.999949) == "99.99%"
    assert format_percent(0.99996) == "99.996%"
    assert format_percent(0.0) == "0.00%"
    assert format_percent(-0.5) == "-50.00%"
    assert format_ratio(999.94) == "999.9×"
    assert [format_significant(value) for value in (0.0354, 9.87, 12.3, 314.2)] == ["0.035", "9.87", "12.3", "314"]


def test_missing_matplotlib_says_what_to_install(monkeypatch):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=r"--output needs matplotlib: pip install 'kronattn\[plots\]'"):
        require_library("matplotlib", "--output")
