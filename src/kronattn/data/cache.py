"""Decoded data in a folder: whoever comes first decodes and writes it, all others read it, at the same time or later.

Files are mapped into memory, so that processes on one machine share one copy of them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock  # comes with torch
from torch import Tensor

from kronattn.data.archives import Entry

__all__ = ["Decoded", "cached", "fingerprint"]

# Tensors by name, and the names of samples that could not be read.
Decoded = tuple[dict[str, Tensor], list[str]]

_BAD = "bad.json"


def fingerprint(entries: Iterable[Entry], *settings: object) -> str:
    """A name for what becomes of these files under these settings; another one when a file changes.

    Example:
        >>> fingerprint([], 32) == fingerprint([], 32), fingerprint([], 32) == fingerprint([], 64)
        (True, False)
    """
    found = hashlib.sha256(repr(settings).encode())
    times: dict[Path, tuple[int, int]] = {}
    for entry in entries:
        if entry.path not in times:
            state = entry.path.stat()
            times[entry.path] = (state.st_mtime_ns, state.st_size)
        found.update(repr((str(entry.path.resolve()), entry.name, entry.offset, *times[entry.path])).encode())
    return found.hexdigest()[:32]


def cached(folder: Path | None, key: str, make: Callable[[], Decoded]) -> Decoded:
    """What ``make`` gives, from the folder where it is there already; without a folder, from ``make`` alone.

    Example:
        >>> cached(None, "digits", lambda: ({"labels": torch.arange(2)}, []))
        ({'labels': tensor([0, 1])}, [])
    """
    if folder is None:
        return make()
    place = folder / key
    folder.mkdir(parents=True, exist_ok=True)
    # The system takes the lock back when a process is killed.
    with FileLock(folder / f"{key}.lock"):
        if not place.exists():
            made = make()
            try:
                _write(place, *made)
            except OSError as error:
                raise OSError(
                    f"decoded images could not be written to the cache {folder} ({error.strerror}): make room, name "
                    f"another folder, or leave the cache out"
                ) from None
    return _read(place)


def _write(place: Path, tensors: Mapping[str, Tensor], bad: list[str]) -> None:
    temporary = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        for name, tensor in tensors.items():
            np.save(temporary / f"{name}.npy", tensor.numpy())
        (temporary / _BAD).write_text(json.dumps(bad))
        temporary.rename(place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read(place: Path) -> Decoded:
    # Copy-on-write: nothing that is done to the tensors reaches the files, and what is only read is shared.
    tensors = {file.stem: torch.from_numpy(np.load(file, mmap_mode="c")) for file in sorted(place.glob("*.npy"))}
    return tensors, json.loads((place / _BAD).read_text())
