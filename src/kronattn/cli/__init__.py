"""The ``kronattn`` command: one thin file for each sub-command, found in :mod:`kronattn.cli.app`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``kronattn`` command and return its exit code: 0, 1 for a failed check, 2 for bad input."""
    try:
        from kronattn.cli.app import run
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        print(
            f"kronattn: error: the command needs {missing.name}: pip install 'kronattn[cli]'",
            file=sys.stderr,
        )
        return 2
    return run(sys.argv[1:] if arguments is None else arguments)
