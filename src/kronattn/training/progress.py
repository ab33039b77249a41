"""How far a run is: a bar on a terminal, a line for each epoch elsewhere. Both on standard error."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import Callback

from kronattn.training.callbacks import History, Speed

__all__ = ["EpochBar", "EpochLines", "Progress", "progress_callback"]

Progress = Literal["bar", "lines"] | None

# Seconds between two looks of the bar at the clock and the count: more often would take time from training.
_EVERY = 0.2


def progress_callback(kind: Progress, history: History, speed: Speed) -> list[Callback]:
    """What shows the progress, or nothing."""
    if kind is None:
        return []
    return [EpochBar(speed) if kind == "bar" else EpochLines(history, speed)]


class EpochLines(Callback):
    """``epoch 3 of 60: loss 1.203, top1 81.2%, 14,230 images/s, 0.4% waiting for data, 41 s left``."""

    def __init__(self, history: History, speed: Speed) -> None:
        self.history = history
        self.speed = speed
        self._start = 0.0
        self._first = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start, self._first = time.monotonic(), trainer.global_step

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            done, total = trainer.global_step, _total_steps(trainer)
            left = (time.monotonic() - self._start) / max(1, done - self._first) * (total - done)
            print(self._line(trainer, left), file=sys.stderr, flush=True)

    def _line(self, trainer: L.Trainer, left: float) -> str:
        row = self.history.rows[-1]
        parts = [f"loss {row['train/loss']:.3f}"]
        parts += [
            f"{name.removeprefix('val/')} {100 * value:.1f}%"
            for name, value in row.items()
            if name.startswith("val/") and name != "val/loss"
        ]
        if self.speed.epochs:
            last = self.speed.epochs[-1]
            parts += [f"{last.images_per_second:,.0f} images/s", f"{last.waiting:.1%} waiting for data"]
        return (
            f"epoch {trainer.current_epoch + 1} of {_total_epochs(trainer)}: {', '.join(parts)}, {duration(left)} left"
        )


class EpochBar(Callback):
    """A bar over all steps of the run, with the epoch, images a second, the share of waiting, and the time left."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self._bar: Any = None
        self._task: Any = None
        self._shown = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"))
        self._bar = Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=Console(stderr=True))
        self._task = self._bar.add_task(
            "Training", total=_total_steps(trainer), completed=trainer.global_step, speed=""
        )
        self._bar.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if self._bar is not None and (now - self._shown > _EVERY or trainer.is_last_batch):
            self._shown = now
            speed = ""
            if self.speed.epochs:
                last = self.speed.epochs[-1]
                speed = f"{last.images_per_second:,.0f} images/s, {last.waiting:.0%} waiting for data"
            description = f"Epoch {trainer.current_epoch + 1} of {_total_epochs(trainer)}"
            self._bar.update(self._task, completed=trainer.global_step, description=description, speed=speed)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def duration(seconds: float) -> str:
    """A time for readers.

    Example:
        >>> duration(41.3), duration(192), duration(7500)
        ('41 s', '3 min 12 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _total_steps(trainer: L.Trainer) -> int:
    return trainer.max_steps if trainer.max_steps > 0 else int(trainer.num_training_batches) * (trainer.max_epochs or 0)


def _total_epochs(trainer: L.Trainer) -> int:
    """The last may be cut short, where a run is told its iterations."""
    return math.ceil(_total_steps(trainer) / trainer.num_training_batches)
