"""What the sub-commands share: where files may go, JSON on standard output, progress on standard error."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from kronattn.atomic import write_atomically

__all__ = [
    "be_quiet",
    "check_writable",
    "console",
    "measuring",
    "print_json",
    "progress",
    "say",
    "write_atomically",
    "write_figure",
    "write_json",
]

Item = TypeVar("Item")

_quiet = False

console = Console()
_progress_console = Console(stderr=True)


def be_quiet(wanted: bool) -> bool:
    """Called with what --quiet says, before a command begins."""
    global _quiet
    _quiet = wanted
    return wanted


def print_json(payload: Any) -> None:
    """Write one JSON object to standard output, and nothing else."""
    print(json.dumps(payload, indent=2))


def say(*lines: str) -> None:
    """Lines on standard output as they are: a path is neither coloured nor broken."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress(items: Sequence[Item], description: str) -> Iterable[Item]:
    """Yield ``items`` behind a progress bar on standard error, so that standard output stays clean."""
    if _quiet or not _progress_console.is_terminal:
        return items
    return track(items, description=description, console=_progress_console)


measuring = partial(progress, description="Measuring")


def check_writable(path: Path, option: str = "--output") -> Path:
    """Refuse an output path that could not be written, before hours of work are spent on filling it.

    Nothing is made here: bad input that is found later is to leave no empty folders behind.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path} is a folder; give the path of a file")
    folder = path.parent
    there = next(place for place in (folder, *folder.parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise OSError(f"{option} {path}: cannot write into {folder} ({error.strerror})") from None
    return path


def write_figure(path: Path, figure: Any) -> None:
    """Write a matplotlib figure in the format that the path's suffix names."""
    from kronattn.present import figure_bytes

    write_atomically(path, figure_bytes(figure, path.suffix.lower()[1:]))


def write_json(path: Path, payload: Any, indent: int = 2) -> None:
    """Write one JSON object as a file."""
    write_atomically(path, json.dumps(payload, indent=indent) + "\n")
