"""A process's share of a part of the soak. Not in ``__main__``, which processes that are started do not import."""

from __future__ import annotations

import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path

import torch

from tests.soak.part import Outcome, Part, Tally

# Module, whether several processes share its cases, whether it runs on a GPU.
PARTS = {
    "operators": ("tests.soak.operators", True, True),
    "layers": ("tests.soak.layers", True, True),
    "options": ("tests.soak.options", True, True),
    "kills": ("tests.soak.kills", True, True),
    "files": ("tests.soak.files", True, False),
    "page": ("tests.soak.page", False, False),
    "threads": ("tests.soak.threads", False, True),
}
# Seconds.
_TELLS_EVERY = 60


def work(name: str, first: int, step: int, seconds: float, most: int | None, device: str) -> Tally:
    """One process's cases: every ``step``-th number from ``first`` on, for so many seconds once all is prepared."""
    torch.set_num_threads(1)
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="kronattn-soak-") as folder:
        part = open_part(name, Path(folder), device)
        number, deadline, told = first, time.monotonic() + seconds, time.monotonic()
        try:
            while time.monotonic() < deadline and (most is None or tally.cases < most):
                outcome = careful(part, number)
                for wrong in outcome.wrong:
                    print(
                        f"WRONG {name}:{number}: {wrong}\n  again: python -m tests.soak --case {name}:{number} "
                        f"--device {device}",
                        flush=True,
                    )
                tally.add(number, outcome)
                number += step
                if time.monotonic() - told > _TELLS_EVERY and first % step == 0:
                    told = time.monotonic()
                    print(f"{name}: {step * tally.cases:,} cases so far", flush=True)
        finally:
            figures = dict(part.close())
            for wrong in figures.pop("wrong", []):
                print(f"WRONG {name}: {wrong}", flush=True)
                tally.fail(None, wrong)
            tally.figures = figures
    return tally


def open_part(name: str, folder: Path, device: str) -> Part:
    return import_module(PARTS[name][0]).PART(folder, device)


def careful(part: Part, number: int) -> Outcome:
    """Whatever a case raises is something that it found."""
    try:
        return part.run(number)
    except Exception:
        return Outcome([{"raised": True}], [traceback.format_exc(limit=-4)])
