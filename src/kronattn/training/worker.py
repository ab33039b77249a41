"""A process that trains one run after another: started by :mod:`kronattn.training.workers`, and told by its input.

What the first run imports, compiles, tunes and decodes, the next ones find ready.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from kronattn.training.errors import one_line_of
from kronattn.training.folder import LOG, PLANNED
from kronattn.training.recipe import load_recipe
from kronattn.training.run import train

__all__ = ["main"]


def main() -> None:
    """For each line of input, a JSON object with ``folder``, ``decoded`` and ``options`` for
    :func:`kronattn.training.run.train`: train what is planned in that folder, and answer with a line, its ``failure``
    in one line or ``""``. What a run prints goes to its log."""
    # Ctrl-C in a terminal reaches all processes of a command: the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_after, args=[os.getppid()], daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    store: dict[str, Any] = {}
    for line in sys.stdin:
        order = json.loads(line)
        folder, decoded = Path(order["folder"]), order["decoded"]
        with _logged(folder / LOG):
            failure = _train(folder, Path(decoded) if decoded else None, store, order["options"])
        # What was captured for the last network.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        answers.write(json.dumps({"failure": failure}) + "\n")
        answers.flush()


def _train(folder: Path, decoded: Path | None, store: dict[str, Any], options: dict[str, Any]) -> str:
    try:
        recipe = load_recipe(folder / PLANNED)
        train(recipe, folder=folder, resume=True, progress="lines", decoded=decoded, store=store, **options)
    except Exception as error:
        traceback.print_exc()
        return one_line_of(error)
    return ""


def _end_after(parent: int) -> None:
    """End with the process that started this one: killed, it cannot say so, and a run that goes on alone would write
    into the folder of the one that takes its place."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Send everything that is printed, by whichever library, to a file."""
    kept = [os.dup(1), os.dup(2)]
    with path.open("a") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in enumerate(kept, start=1):
            os.dup2(original, number)
            os.close(original)


if __name__ == "__main__":
    main()
