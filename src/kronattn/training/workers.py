"""Runs side by side, in processes that each train one run after another."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, current_thread, main_thread
from typing import IO, Any, Protocol

from kronattn.training.folder import LOG, PLANNED
from kronattn.training.recipe import Recipe, recipe_yaml

__all__ = ["Plan", "Queue", "Tasks", "run_in_processes", "serve"]

# Seconds that a process has to end by itself: what it was at is resumed from its last epoch either way.
_PATIENCE = 5.0


class Plan(Protocol):
    """A run: its recipe, and the folder that it goes to."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def folder(self) -> Path: ...
    @property
    def options(self) -> Mapping[str, Any]:
        """Further ones for :func:`kronattn.training.run.train`, which JSON can carry."""
        ...


class Tasks(Protocol):
    """Where processes get what they train; thread-safe."""

    def take(self, known: set[str]) -> Any:
        """The next plan for a process that has trained the networks ``known``, or ``None`` when all are taken."""
        ...

    def clear(self) -> None:
        """Give out nothing more."""
        ...


class Queue:
    """What is still to be trained, in order, shared out so that a process keeps to the networks that it knows.

    With fewer processes than networks the order comes first: a comparison that is stopped then compares all networks
    with few seeds rather than few networks with all.
    """

    def __init__(self, plans: Sequence[Plan], processes: int) -> None:
        self._pending = list(enumerate(plans))
        networks = len({one.recipe.model.label for one in plans})
        self._round = networks if processes < networks else max(1, len(plans))
        self._lock = Lock()

    def take(self, known: set[str]) -> Plan | None:
        """The next one for a process that has trained the networks ``known``, which this one is added to."""
        with self._lock:
            if not self._pending:
                return None

            def late(entry: tuple[int, Plan]) -> tuple[int, bool, int]:
                place, one = entry
                return place // self._round, one.recipe.model.label not in known, place

            chosen = min(self._pending, key=late)
            self._pending.remove(chosen)
        known.add(chosen[1].recipe.model.label)
        return chosen[1]

    def clear(self) -> None:
        with self._lock:
            self._pending.clear()


def run_in_processes(
    plans: Sequence[Plan], processes: int, done: Callable[[Any, str], None], decoded: Path | None = None
) -> None:
    """Train all plans; ``done(plan, failure)`` is called after each, from any thread, with one line or ``""``.

    Args:
        decoded: a folder through which the processes share decoded images.
    """
    serve(Queue(plans, processes), min(processes, len(plans)), done, decoded)


def serve(queue: Tasks, processes: int, done: Callable[[Any, str], None], decoded: Path | None = None) -> None:
    """As :func:`run_in_processes`, with what is to be trained from any queue.

    Ctrl-C and SIGTERM end the processes. Of what they were at nothing is told: it is neither done nor failed.
    """
    stopping = Event()
    workers = [_Worker(decoded, stopping) for _ in range(processes)]

    def work(worker: _Worker) -> None:
        known: set[str] = set()
        while (one := queue.take(known)) is not None:
            failure = worker.train(one)
            if stopping.is_set():
                return
            if failure:
                # An error on a GPU may be the last thing that a process does there.
                worker.stop()
                known.clear()
            done(one, failure)

    pool = ThreadPoolExecutor(max(1, len(workers)))
    try:
        with _sigterm_as_ctrl_c():
            for finished in as_completed([pool.submit(work, worker) for worker in workers]):
                finished.result()
    except BaseException:
        # Nobody asks the queue again, and the processes end: what they were at can be resumed.
        stopping.set()
        queue.clear()
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.stop()
        raise
    finally:
        pool.shutdown()
        for worker in workers:
            worker.stop()


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Have SIGTERM raise what Ctrl-C does: its default would leave the processes behind. Python hears signals in its
    main thread alone."""
    if current_thread() is not main_thread():
        yield
        return
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        # One that is not Python's own cannot be put back.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None:
        with suppress(OSError):
            pipe.close()


class _Worker:
    """A process of :mod:`kronattn.training.worker`, started when there is something to do, and ``stopping`` not set."""

    def __init__(self, decoded: Path | None, stopping: Event) -> None:
        self.decoded = decoded
        self._stopping = stopping
        self._process: subprocess.Popen[str] | None = None

    def train(self, one: Plan) -> str:
        """Train one plan; its failure in one line, or ``""``."""
        one.folder.mkdir(parents=True, exist_ok=True)
        (one.folder / PLANNED).write_text(recipe_yaml(one.recipe))
        process = self._process = self._process or self._start()
        if self._stopping.is_set():
            # Whoever set it may have looked for processes before this one was there.
            self.stop()
            return "interrupted"
        assert process.stdin is not None
        assert process.stdout is not None
        order = {
            "folder": str(one.folder),
            "decoded": str(self.decoded) if self.decoded else None,
            "options": dict(one.options),
        }
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except (OSError, ValueError):
            # It ended, or was stopped: a closed pipe is a ValueError.
            answer = ""
        return json.loads(answer)["failure"] if answer else self._how_it_ended(process, one)

    def terminate(self) -> None:
        """Tell the process to end, and do not wait for it."""
        if (process := self._process) is not None:
            process.terminate()

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        # One that catches the signal reads on, and ends with its input.
        _close(process.stdin)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _close(process.stdout)

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kronattn.training.worker"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _how_it_ended(self, process: subprocess.Popen[str], one: Plan) -> str:
        code = process.wait()
        if code < 0:
            return (
                f"its process was killed ({signal.Signals(-code).name}); started again, it goes on from its last epoch"
            )
        log = one.folder / LOG
        lines = log.read_text().strip().splitlines() if log.exists() else []
        return lines[-1] if lines else f"its process ended with exit code {code}"
