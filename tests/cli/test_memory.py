"""Memory that a command keeps: fewer page faults, said to the processes that it starts, and never against the user."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
GLIBC = "CS_GNU_LIBC_VERSION" in getattr(os, "confstr_names", {})
pytestmark = pytest.mark.skipif(not GLIBC, reason="needs glibc")

FAULTS = """
import os, resource, torch
from kronattn import create_model
from kronattn.cli.memory import keep_freed_memory

keep_freed_memory()
model, x = create_model("mobilenetv2").eval(), torch.randn(1, 3, 128, 128)
with torch.no_grad():
    for _ in range(5):
        model(x)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        model(x)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10, *map(os.environ.get, {names}))
"""


def run(**environment):
    kept = {name: value for name, value in os.environ.items() if name not in NAMES}
    found = subprocess.run(
        [sys.executable, "-c", FAULTS.replace("{names}", repr(NAMES))],
        env={**kept, **environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    faults, *said = found.stdout.split()
    return int(faults), said


def test_a_forward_asks_for_no_new_pages():
    faults, said = run()
    # It was more than a thousand: fifty are whatever else the process does.
    assert faults < 50
    assert all(int(size) >= 2**25 for size in said)


def test_what_the_environment_says_holds():
    _, said = run(MALLOC_TRIM_THRESHOLD_="1000000")
    assert said == ["None", "1000000"]
