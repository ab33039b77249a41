"""No two places with ten or more like lines: what is written twice is changed once."""

from __future__ import annotations

import ast
from pathlib import Path

import kronattn

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path(kronattn.__file__).parent
LIKE = 10


def code_lines(path: Path) -> list[tuple[int, str]]:
    """(number, text) of lines that say something: without docstrings, comments, imports, signatures."""
    tree = ast.parse(path.read_text())
    skipped: set[int] = set()
    for node in ast.walk(tree):
        told = isinstance(node, ast.Import | ast.ImportFrom)
        told |= (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        )
        told |= isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        if told:
            skipped |= set(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, ast.FunctionDef):
            skipped |= set(range(node.lineno, node.body[0].lineno))
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.split("  #")[0].strip()
        # A line of brackets alone is no likeness.
        if number not in skipped and not text.startswith("#") and any(letter.isalnum() for letter in text):
            found.append((number, text))
    return found


def repeated(paths: list[Path], like: int) -> list[str]:
    """Places whose lines stand elsewhere as well, the first of each."""
    first: dict[tuple[str, ...], str] = {}
    found = []
    for path in paths:
        lines = code_lines(path)
        for start in range(len(lines) - like + 1):
            window = tuple(text for _, text in lines[start : start + like])
            place = f"{path.parent.name}/{path.name}:{lines[start][0]}"
            if window in first:
                found.append(f"{place} is like {first[window]}")
            else:
                first[window] = place
    return found


def test_nothing_is_written_twice():
    kernels = SOURCE / "ops" / "triton"
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if kernels not in path.parents]
    assert repeated([*paths, *sorted((ROOT / "tools").glob("*.py"))], LIKE) == []


def test_a_likeness_is_seen(tmp_path):
    body = "\n".join(f"    value{number} = {number}" for number in range(LIKE))
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(f'def {name}():\n    """Doc {name}."""\n{body}\n')
    assert repeated(sorted(tmp_path.glob("*.py")), LIKE) == [f"{tmp_path.name}/b.py:3 is like {tmp_path.name}/a.py:3"]
    assert repeated(sorted(tmp_path.glob("*.py")), LIKE + 1) == []
