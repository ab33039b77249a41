"""Ctrl-C in the middle of a run: an exception of our own in place of Lightning's exit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import lightning as L

from kronattn.training.errors import OneLineError

__all__ = ["Interrupted", "interruptible"]


class Interrupted(OneLineError):
    """The run was stopped by its user; the command exits as a shell expects after Ctrl-C."""

    exit_code = 130


@contextmanager
def interruptible(trainer: L.Trainer) -> Iterator[None]:
    """Raise :class:`Interrupted` where Lightning would end the process with 1, and keep Ctrl-C working afterwards."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as end:
        # Others may end a process, too; Lightning does so while it handles Ctrl-C.
        if not isinstance(end.__context__, KeyboardInterrupt):
            raise
        if handler is not None:
            # Lightning ignores the signal from the first one on.
            signal.signal(signal.SIGINT, handler)
        raise Interrupted("interrupted") from None
    if trainer.interrupted:
        raise Interrupted("interrupted")
