"""A section of the report: what it is asked for, and what it hands back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kronattn.data.decoded import Track, untracked
from kronattn.present import Table

__all__ = ["Content", "Drawing", "Highlight", "Section", "Settings"]


@dataclass(frozen=True)
class Settings:
    """How a report is made.

    ``quick`` asks for the smallest sizes that still show something. ``track(items, description)`` wraps long
    loops, in a progress bar for instance.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    quick: bool = False
    track: Track = untracked


@dataclass(frozen=True)
class Drawing:
    """A matplotlib figure, its caption, and a description for those who cannot see it.

    ``narrow`` figures do not take the page's whole width.
    """

    figure: Any
    caption: str
    description: str
    narrow: bool = False


@dataclass(frozen=True)
class Highlight:
    """One number worth the top of the page."""

    value: str
    label: str


@dataclass(frozen=True)
class Content:
    """What a section found. ``passed`` is whether every statement that it checks holds."""

    introduction: str
    tables: Sequence[Table] = ()
    drawings: Sequence[Drawing] = ()
    highlights: Sequence[Highlight] = ()
    passed: bool = True


@dataclass(frozen=True)
class Section:
    """A section by name, title, and the function that does its work."""

    name: str
    title: str
    build: Callable[[Settings], Content]
