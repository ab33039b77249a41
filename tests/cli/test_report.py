"""``kronattn report``: one page, complete in itself."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import pytest

from kronattn.cli import main
from tests.browser import browser

__all__ = ["browser"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The quick report, made once: its exit code, its text and its folder."""
    folder = tmp_path_factory.mktemp("report")
    code = main(["report", "--quick", "--output", str(folder / "out" / "report.html")])
    return code, (folder / "out" / "report.html").read_text(encoding="utf-8"), folder


class Outline(HTMLParser):
    """Open tags and attributes, and whether every tag was closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.problems = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)


def test_page_is_written_whole(made):
    code, page, folder = made
    assert code == 0
    assert [path.name for path in (folder / "out").iterdir()] == ["report.html"]
    outline = Outline(page)
    assert not outline.open
    assert not outline.problems
    for text in ("Table 2", "8×14²×8", "97.71%", "Table 6", "Theorem 1", "Eq. 13", "✓", "Measured with"):
        assert text in page


def test_page_fetches_nothing(made):
    _, page, _ = made
    without_images = re.sub(r"data:image/svg\+xml;base64,[A-Za-z0-9+/=]+", "", page)
    assert "http" not in without_images
    assert "//" not in without_images
    assert "@import" not in page
    assert "url(" not in page
    assert {tag for tag, _ in Outline(page).tags}.isdisjoint({"script", "link", "iframe", "object"})


def test_figures_are_inside_and_described(made):
    _, page, _ = made
    images = [attributes for tag, attributes in Outline(page).tags if tag == "img"]
    assert len(images) == 7
    for image in images:
        kind, data = image["src"].split(",", 1)
        assert kind == "data:image/svg+xml;base64"
        svg = base64.b64decode(data)
        assert b"</svg>" in svg
        assert not re.search(rb'(href|src)="http', svg)
        assert len(image["alt"]) > 20


def test_the_legend_holds_for_every_figure(made):
    """Black is this run's; what the paper prints is grey, what earlier training runs found is another colour."""
    _, page, _ = made
    assert 'class="stored">Blue figures</span> are those of training runs' in page
    table = page[page.index("Table 3") :]
    top1 = re.search(r'<td class="number"[^>]*>(.*?)</td>', table)[1]
    assert re.fullmatch(r'<span class="printed">0\.\d{3}</span>', top1)
    table = page[page.index("Table 6: DeepLabV2 with four heads") :]
    accuracy = re.search(r'<td class="number"[^>]*>(.*?)</td>', table)[1]
    assert re.fullmatch(r'<span class="stored">0\.\d{3}</span><span class="printed">0\.\d{3}</span>', accuracy)


def test_attention_on_a_photograph(made):
    _, page, _ = made
    section = page[page.index('id="attention"') :]
    assert "Predicted: church" in section
    assert "photograph by danielbuechele" in section


def test_every_registered_section_is_linked(made):
    from kronattn.report import SECTIONS

    _, page, _ = made
    identifiers = {attributes.get("id") for _, attributes in Outline(page).tags}
    for section in SECTIONS:
        assert section.name in identifiers
        assert f'href="#{section.name}"' in page


def test_failed_check_is_shown_and_exits_with_1(tmp_path, monkeypatch, capsys):
    import kronattn.report as package
    from kronattn.present import Cell, Column, Group, Table
    from kronattn.report import Content, Section

    table = Table("Checks", [Column("")], [Group("", [[Cell("✗", tone="bad")]])])
    broken = Section("broken", "A <broken> section", lambda settings: Content("It fails.", [table], passed=False))
    monkeypatch.setattr(package, "SECTIONS", [broken])
    target = tmp_path / "report.html"
    assert main(["report", "--output", str(target)]) == 1
    assert '<span class="bad">✗</span>' in target.read_text(encoding="utf-8")
    assert "A &lt;broken&gt; section" in target.read_text(encoding="utf-8")
    assert "✗" in capsys.readouterr().out


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off_in_a_browser(made, width, browser):
    _, _, folder = made
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto((folder / "out" / "report.html").as_uri())
    wide = page.evaluate(
        "() => [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
        ".map(e => e.tagName + ' ' + e.textContent.slice(0, 40))"
    )
    assert wide == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "abacus"], "device must be auto, cpu, cuda or mps"),
        (["--dtype", "float8"], "dtype must be one of"),
        (["--output", "report.pdf"], "--output must end in .html"),
        (["--output", "/dev/null/report.html"], "/dev/null"),
    ],
)
def test_bad_input_is_one_line_before_any_work(arguments, message, capsys, monkeypatch):
    import kronattn.report as package

    monkeypatch.setattr(package, "SECTIONS", None)  # starting on the sections would raise
    assert main(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err
