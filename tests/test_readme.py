"""The README and the guide say what the files in results/ say, and the README's commands exist."""

from __future__ import annotations

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
