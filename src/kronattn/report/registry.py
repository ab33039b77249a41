"""The sections of the report, in order. A new one is a file with a ``build`` function, and one line here."""

from __future__ import annotations

from kronattn.report import attention, networks, operators, segmentation, theorem, training
from kronattn.report.section import Section

__all__ = ["SECTIONS"]

SECTIONS: list[Section] = [
    Section("operators", "What attention costs", operators.build),
    Section("networks", "What networks cost", networks.build),
    Section("segmentation", "What segmentation heads cost", segmentation.build),
    Section("training", "A network that learns: digits", training.build),
    Section("attention", "Where attention looks", attention.build),
    Section("theorem", "Why averages are enough: Theorem 1", theorem.build),
]
