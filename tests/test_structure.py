"""Each room of the house depends only on the rooms above it, and no import hides in a function to get around that."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import kronattn

SOURCE = Path(kronattn.__file__).parent
CONTRIBUTING = Path(__file__).resolve().parent.parent / "CONTRIBUTING.md"

# Each may import those before it.
ROOMS = [
    "version",
    "names",
    "extras",
    "atomic",
    "ops",
    "nn",
    "distributions",
    "inference",
    "models",
    "data",
    "measure",
    "present",
    "tasks",
    "training",
    "tables",
    "study",
    "explain",
    "predict",
    "export",
    "bench",
    "demo",
    "report",
    "integrations",
    "cli",
]

# Within ops: functions on the left may import those before them.
OPS = [
    "compat", "autocast", "fx", "checks", "native", "coefficients", "attend", "grid", "masks", "matrices", "reference",
    "torch_backend", "matrix_products", "triton", "plan", "stages", "attention", "kronecker",
]  # fmt: skip


def imports(path: Path):
    """(line, module, whether inside a function) of every import of ours."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(child) for function in functions for child in ast.walk(function)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "kronattn":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.split(".")[0] == "kronattn"]
        for name in names:
            yield node.lineno, name, id(node) in inside


def room_of(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "kronattn"


def test_every_room_is_listed():
    rooms = {path.stem if path.is_file() else path.name for path in SOURCE.iterdir() if path.name[0] not in "_."}
    assert rooms - {"weights", "recipes", "studies", "py"} <= {*ROOMS}


def test_contributing_has_the_same_list():
    table = CONTRIBUTING.read_text().split("\n\n`tests/` mirrors this")[0]
    assert re.findall(r"^\| `(\w+)(?:/|\.py)` \|", table, re.MULTILINE) == ROOMS


def test_contributing_names_files_that_are_there():
    text = CONTRIBUTING.read_text()
    for name in re.findall(r"`((?:ops|nn|models|data|training|cli|report)/[\w/]+\.py)`", text):
        assert (SOURCE / name).exists(), name
    for name in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (CONTRIBUTING.parent / name).exists(), name


def test_imports_go_down():
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own not in ROOMS:
            continue  # the package's own __init__ and __main__
        for line, name, _ in imports(path):
            room = room_of(name)
            if room in ROOMS and ROOMS.index(room) > ROOMS.index(own):
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {name}")
    assert wrong == []


def test_operators_import_down():
    wrong = []
    for path in sorted((SOURCE / "ops").rglob("*.py")):
        parts = path.relative_to(SOURCE / "ops").parts
        own = parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for line, name, _ in imports(path):
            module = name.split(".")[2] if len(name.split(".")) > 2 else ""
            if module not in OPS or module == own:
                continue
            # What needs Triton itself is imported when it is first called.
            if OPS.index(module) > OPS.index(own):
                wrong.append(f"{path.relative_to(SOURCE)}:{line} imports {name}")
    assert wrong == []


def test_no_import_hides_in_a_function():
    """But for what needs Triton, which not every build of PyTorch comes with."""
    hidden = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for folder in ("ops", "nn")
        for path in sorted((SOURCE / folder).rglob("*.py"))
        for line, name, inside in imports(path)
        if inside and not name.startswith("kronattn.ops.triton.")
    ]
    assert hidden == []


def test_no_room_imports_a_private_name_of_another():
    found = [
        f"{path.relative_to(SOURCE)}:{line} imports {name}"
        for path in SOURCE.rglob("*.py")
        for line, name, _ in imports(path)
        if re.match(r"_(?!_)", name.split(".")[-1]) and room_of(name) != path.relative_to(SOURCE).parts[0]
    ]
    assert not found
