"""Soak kronattn: random cases against the float64 reference, kills, bad files, a besieged page, threads.

    python -m tests.soak --minutes 30 --seed 7                     # all parts, an equal share of the time each
    python -m tests.soak --parts operators --processes 10 --device cuda --minutes 4
    python -m tests.soak --case operators:7000123                  # one case again, alone

What was tried and what was found goes into results/soak.json, a section for each part and device; --merge takes in the
sections of a file that was written elsewhere. The exit code is 1 where anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kronattn.atomic import write_atomically
from kronattn.measure import describe_environment
from tests.soak.part import CASES_OF_A_SEED, Tally
from tests.soak.work import PARTS, careful, open_part, work

RESULTS = Path(__file__).resolve().parents[2] / "results" / "soak.json"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.merge:
        _write(options.output, json.loads(options.merge.read_text()))
        return 0
    if options.case:
        name, _, number = options.case.partition(":")
        return _again(name, int(number), options.device)
    failed = 0
    names = options.parts.split(",")
    for name in names:
        section, wrong = _soak(name, options, options.minutes * 60 / len(names))
        failed += wrong
        _write(options.output, {f"{name}/{_kind(options.device)}": section})
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together (10)")
    parser.add_argument("--cases", type=int, help="stop a part after about so many cases")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other cases (0)")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"which of {','.join(PARTS)}")
    parser.add_argument("--processes", type=int, default=1, help="that share the cases of a part (1)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--case", help="one case again: PART:NUMBER")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the file of results (results/soak.json)")
    parser.add_argument("--merge", type=Path, help="take the sections of this file into --output")
    return parser


def _soak(name: str, options: argparse.Namespace, seconds: float) -> tuple[dict[str, Any], int]:
    if name not in PARTS:
        raise SystemExit(f"there is no part {name!r}: there are {', '.join(PARTS)}")
    _, shared, on_gpu = PARTS[name]
    device = options.device if on_gpu else "cpu"
    workers = options.processes if shared else 1
    start = time.monotonic()
    each = None if options.cases is None else -(-options.cases // workers)
    jobs = [(name, options.seed * CASES_OF_A_SEED + first, workers, seconds, each, device) for first in range(workers)]
    tally = Tally()
    if workers == 1:
        tally.merge(work(*jobs[0]))
    else:
        # A pool of multiprocessing would not do: its processes may have no children, which loaders of data are.
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            for found in pool.map(work, *zip(*jobs, strict=True)):
                tally.merge(found)
    tally.seconds = time.monotonic() - start
    print(f"{name} on {device}: {tally.cases:,} cases, {tally.failed} wrong, {tally.seconds:.0f} s", flush=True)
    environment = describe_environment(device) | {"processes": workers}
    command = f"python -m tests.soak --parts {name} --seed {options.seed} --device {device} --processes {workers}"
    return {"command": command, "environment": environment} | tally.as_dict(), tally.failed


def _again(name: str, number: int, device: str) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="kronattn-soak-") as folder:
        part = open_part(name, Path(folder), device)
        try:
            outcome = careful(part, number)
        finally:
            part.close()
    for tried in outcome.tried:
        print(", ".join(f"{what}: {which}" for what, which in tried.items()))
    for wrong in outcome.wrong:
        print(f"WRONG: {wrong}")
    return 1 if outcome.wrong else 0


def _kind(device: str) -> str:
    return torch.device(device).type


def _write(path: Path, sections: dict[str, Any]) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    write_atomically(path, json.dumps(dict(sorted((known | sections).items())), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
