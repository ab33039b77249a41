"""What a part of the soak is, and what is written down about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

import pytest
import torch

from tests.ops.cases import poison_empty

# Of failures, of which one is enough to know: a soak that goes wrong everywhere should not fill the disk.
KEPT_FAILURES = 50
# Numbers of cases that one seed has to itself.
CASES_OF_A_SEED = 10_000_000


@dataclass
class Outcome:
    """What one case tried, as {what: which}, and what was wrong with it, in words. A case may try several things."""

    tried: list[Mapping[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


# Shapes that the cases of one seed have on a GPU, where every new block size is a kernel to compile, of a second each.
SHAPES_ON_GPU = 48


def shapes_of(number: int, draw: Random, device: torch.device) -> Random:
    """What a case's sizes are drawn with: as everything else or, on a GPU, so that few are drawn again and again."""
    if device.type != "cuda":
        return draw
    seed = number // CASES_OF_A_SEED
    return Random(f"shapes {seed} {number % SHAPES_ON_GPU}")


class Part(Protocol):
    """Cases that follow from their number alone, so that each can be run again."""

    def __init__(self, folder: Path, device: str) -> None:
        """``folder`` is empty, and this part's own."""

    def run(self, number: int) -> Outcome: ...

    def close(self) -> Mapping[str, Any]:
        """Called at the end; gives figures about all cases together, and under "wrong" what was wrong with them."""


class OnPoisonedMemory:
    """A part whose cases get memory that is full of NaN, so that whatever is left out shows."""

    def __init__(self, folder: Path, device: str) -> None:
        self.device = torch.device(device)
        self._patches = pytest.MonkeyPatch()
        poison_empty(self._patches)

    def close(self) -> Mapping[str, Any]:
        self._patches.undo()
        return {}


@dataclass
class Tally:
    """What the cases of one part tried and found."""

    cases: int = 0
    seconds: float = 0.0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    failed: int = 0
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, number: int, outcome: Outcome) -> None:
        self.cases += len(outcome.tried)
        for tried in outcome.tried:
            for what, which in tried.items():
                self.counts.setdefault(what, Counter())[str(which)] += 1
        for wrong in outcome.wrong:
            self.fail(number, wrong)

    def fail(self, number: int | None, wrong: str) -> None:
        self.failed += 1
        if len(self.failures) < KEPT_FAILURES:
            self.failures.append({"case": number, "wrong": wrong})

    def merge(self, other: Tally) -> None:
        self.cases += other.cases
        self.failed += other.failed
        self.failures = (self.failures + other.failures)[:KEPT_FAILURES]
        for what, counts in other.counts.items():
            self.counts.setdefault(what, Counter()).update(counts)
        for name, value in other.figures.items():
            self.figures[name] = max(self.figures[name], value) if name in self.figures else value

    def as_dict(self) -> dict[str, Any]:
        counts = {what: dict(sorted(counter.items())) for what, counter in sorted(self.counts.items())}
        rounded = {"cases": self.cases, "failed": self.failed, "seconds": round(self.seconds)}
        return rounded | self.figures | {"counts": counts, "failures": self.failures}
