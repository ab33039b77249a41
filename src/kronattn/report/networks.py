"""The report's section on Tables 3 to 5: what the networks cost."""

from __future__ import annotations

from kronattn.report.section import Content, Settings
from kronattn.tables.networks import measure_networks, network_tables

__all__ = ["build"]

_INTRODUCTION = (
    "Parameters and multiply-adds of KANet, of what it becomes with regular attention or without attention, and of "
    "the networks the paper compares it with, each built here and counted."
)


def build(settings: Settings) -> Content:
    """Count every network of the three tables."""
    measured = measure_networks(track=lambda rows: settings.track(rows, "Counting networks"))
    return Content(_INTRODUCTION, network_tables(measured))
