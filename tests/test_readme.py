"""The README and the guide say what the files in results/ say, and the README's commands exist."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kronattn.cli import main

ROOT = Path(__file__).resolve().parent.parent


def test_tables_are_those_of_the_results():
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "fill.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# A ratio, a time, a share, a speed: what only a measurement can know.
FIGURE = re.compile(r"\d[\d.,]*(?:×(?! ?\d)| ?(?:ms|µs|images a second)\b|%(?! (?:confidence )?interval))")


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_no_figure_is_typed_by_hand(page):
    """Outside of the tables that tools/fill.py writes, and of code."""
    text = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->|```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    assert FIGURE.findall(text) == []


def test_a_figure_that_is_typed_by_hand_would_be_seen():
    assert FIGURE.findall("a 56×56 map is 3.5× as fast, 12 ms, 4% less, 2,579 images a second; the 95% interval") == [
        "3.5×", "12 ms", "4%", "2,579 images a second",
    ]  # fmt: skip


def test_every_file_it_links_to_is_there():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"`kronattn ([a-z ]+?)(?: --[^`]*)?`", (ROOT / "README.md").read_text())))
)
def test_every_command_it_names_has_help_with_an_example(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    assert "Example" in capsys.readouterr().out or (" " not in command and command in ("tables", "bench", "list"))


@pytest.mark.parametrize(
    ("value", "aim", "at", "shown"),
    [
        (1.51, "at most 1.5", 0, "**x**"),
        (1.5, "at most 1.5", 3, "x"),
        (4.9, "at least 5", 1, "**x**"),
        (0.051, "under 5%", 0, "**x**"),
        (14_759, "at least 12,000", 0, "x"),
        (69, "at least 20, 70", 1, "**x**"),
        (69, "at least 20, 70", 0, "x"),
        (121, "at most 90 s", 0, "**x**"),
        (0.04, "within 0.5 of kanet_kv", 0, "x"),
    ],
)
def test_a_goal_that_is_missed_is_bold(value, aim, at, shown, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    written = importlib.import_module("goals").written
    assert written((value, "x"), aim, at) == shown
