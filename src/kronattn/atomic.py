"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["link_atomically", "replacing", "write_atomically"]


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place at the end, if all went well.

    A reader never sees half of the file, and where writing fails (a full disk), what was there before stays. The folder
    is made where it is missing.

    Example:
        >>> with replacing("/tmp/kronattn-example.txt") as temporary:
        ...     _ = temporary.write_text("whole")
        >>> Path("/tmp/kronattn-example.txt").read_text()
        'whole'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def link_atomically(other: str | Path, path: str | Path) -> None:
    """Another name for a file, in the place of whatever had that name."""
    with replacing(path) as temporary:
        temporary.unlink()
        os.link(other, temporary)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a whole file by way of a temporary one."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
