"""Files by name, in folders and in tar archives alike: an archive is read where it lies, never unpacked."""

from __future__ import annotations

import glob
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["Entry", "list_files", "list_folders"]


@dataclass(frozen=True)
class Entry:
    """A file: in a folder, or ``size`` bytes from ``offset`` on of an archive.

    ``name`` is its path below the folder or inside the archive; ``str(entry)`` is what an error calls it.
    """

    name: str
    path: Path
    offset: int = 0
    size: int = -1
    is_folder: bool = False

    def read(self) -> bytes:
        # Opened for each read: a worker process or thread needs no shared file position.
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)

    def text(self) -> str:
        """The content of a text file."""
        try:
            return self.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{self} is not UTF-8: byte {error.start + 1} belongs to no letter") from None

    def __str__(self) -> str:
        return str(self.path) if self.size < 0 else f"{self.path}:{self.name}"


def list_files(source: str | Path | Iterable[str | Path]) -> list[Entry]:
    """Every file of a folder or a tar archive, sorted by name.

    Args:
        source: a folder, a ``.tar``, a pattern such as ``data/*.tar``, or several of these, in a list or with commas.

    Example:
        >>> list_files("nowhere")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no folder or .tar archive 'nowhere'
    """
    return sorted((entry for entry in _list(source) if not entry.is_folder), key=lambda entry: entry.name)


def list_folders(source: str | Path | Iterable[str | Path]) -> list[str]:
    """The names of every folder below a folder or in a tar archive that lists them, sorted; empty ones too."""
    return sorted({entry.name for entry in _list(source) if entry.is_folder})


def _list(source: str | Path | Iterable[str | Path]) -> list[Entry]:
    parts = source.split(",") if isinstance(source, str) else [source] if isinstance(source, Path) else source
    places = [str(part).strip() for part in parts]
    if "" in places:
        # An empty path would be the current folder.
        raise ValueError(f"{source!r} names an empty place: give a folder or a .tar archive, or several with commas")
    return [entry for place in places for path in _matching(place) for entry in _list_one(path)]


def _matching(pattern: str) -> list[Path]:
    if Path(pattern).exists():
        return [Path(pattern)]
    found = [Path(path) for path in sorted(glob.glob(pattern))]
    if not found:
        raise FileNotFoundError(f"there is no folder or .tar archive {pattern!r}")
    return found


def _list_one(path: Path) -> Sequence[Entry]:
    if path.is_dir():
        return [Entry(str(file.relative_to(path)), file, is_folder=file.is_dir()) for file in path.rglob("*")]
    state = path.stat()
    return _list_archive(path, state.st_mtime_ns, state.st_size)


# Every split of a dataset asks for the files and for the folders, and a large archive takes a second to go through.
@lru_cache(maxsize=8)
def _list_archive(path: Path, changed: int, size: int) -> Sequence[Entry]:
    """The entries of an archive as it was when it was last changed."""
    try:
        # Compressed archives are refused: their files cannot be reached without decompressing all before them.
        with tarfile.open(path, "r:") as archive:
            entries = [
                Entry(member.name.removeprefix("./"), path, member.offset_data, member.size, member.isdir())
                for member in _whole_members(archive, path)
                if member.isfile() or member.isdir()
            ]
        # A size below zero would be read as all that follows.
        if any(entry.size < 0 or entry.offset + entry.size > size for entry in entries):
            raise ValueError(f"{path} is broken: a file in it is longer than the archive")
        return entries
    except (tarfile.TarError, EOFError, OverflowError):
        raise ValueError(f"{path} is not a folder or an uncompressed .tar archive: unpack it first") from None


def _whole_members(archive: tarfile.TarFile, path: Path) -> Sequence[tarfile.TarInfo]:
    """The members of an archive that ends as archives do: tarfile takes any other end for one, too."""
    cut_off = ValueError(f"{path} is cut off or damaged: after its last whole file comes no end of a tar archive")
    try:
        members = archive.getmembers()
    except tarfile.ReadError as error:
        raise cut_off if "unexpected end of data" in str(error) else error from None
    with path.open("rb") as file:
        file.seek(archive.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise cut_off
    return members
