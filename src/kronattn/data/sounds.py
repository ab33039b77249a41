"""Sound files, which nothing here reads: where pictures are expected, one of them is named."""

from __future__ import annotations

from collections.abc import Iterable

from kronattn.data.archives import Entry

__all__ = ["refuse_sounds"]

_SUFFIXES = (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".aif", ".aiff")


def refuse_sounds(files: Iterable[Entry], expected: str) -> None:
    """Refuse the first sound file among ``files``, and say what was expected."""
    sound = next((entry for entry in files if entry.name.lower().endswith(_SUFFIXES)), None)
    if sound is not None:
        raise ValueError(f"{sound} is a sound file: {expected}")
