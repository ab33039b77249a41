"""What watches over a training run beside Lightning's own callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.profilers import Profiler
from torch import Tensor, nn

from kronattn.ops.compat import copy_all, lerp_all
from kronattn.training.errors import OneLineError

__all__ = ["Diverged", "EpochSpeed", "Fetching", "History", "MovingAverage", "Speed", "StopWhenDiverging"]


class Diverged(OneLineError):
    """The loss is no longer a number."""


class MovingAverage(WeightAveraging):
    """Lightning's moving average, kept on the device of the network and updated with a few kernels.

    It reaches back over a tenth of the steps so far, until ``decay`` is the shorter memory: with ``decay`` from the
    start, the untrained network would weigh in for as long as a short run lasts.
    """

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay
        # Whether the step itself blends: on the device, with everything else that it does.
        self.blended_in_step = False
        self._tensors: tuple[_Pair, _Pair] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._tensors = None
        # Lightning asks the module, which is still on the CPU at this point.
        self._device = trainer.strategy.root_device
        super().setup(trainer, pl_module, stage)

    def share(self, steps: int) -> float:
        """What the weights after ``steps`` others weigh in the average."""
        return 1 - min(self.decay, (1 + steps) / (10 + steps)) if steps else 1.0

    @torch.no_grad()
    def blend(self, module: nn.Module, share: float | Tensor) -> None:
        """Take the module's weights into the average; ``share`` may be a scalar on the device."""
        assert self._average_model is not None
        if self._tensors is None:
            # Once: to find all of a network's tensors takes the host as long as a good part of a step.
            self._tensors = _pairs(self._average_model.module, module)
        (averages, values), counts = self._tensors
        lerp_all(averages, values, share)
        if counts[0]:
            copy_all(*counts)

    # PyTorch's own update asks the device how many there were, and so waits for the whole step to be done.
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._latest_update_step:
            assert self._average_model is not None
            if not self.blended_in_step:
                self.blend(pl_module, self.share(trainer.global_step - 1))
            self._average_model.n_averaged += 1
            self._latest_update_step = trainer.global_step


_Pair = tuple[list[Tensor], list[Tensor]]


def _pairs(averaged: nn.Module, current: nn.Module) -> tuple[_Pair, _Pair]:
    """Tensors of both that are averaged, and those that are counts and are copied."""

    def tensors(module: nn.Module, floating: bool) -> list[Tensor]:
        return [x for x in chain(module.parameters(), module.buffers()) if x.is_floating_point() == floating]

    averages, counts = ((tensors(averaged, floating), tensors(current, floating)) for floating in (True, False))
    return averages, counts


class StopWhenDiverging(Callback):
    """Ends the run at the end of the first epoch with a loss that is no number, before it reaches a checkpoint.

    The losses are looked at on the device, since asking for each would make the processor wait for the GPU.
    """

    def __init__(self) -> None:
        self._first_bad: Tensor | None = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Not in on_train_epoch_start, which Lightning leaves out of the epoch that a run is resumed with.
        if batch_idx == 0 or self._first_bad is None:
            self._first_bad = torch.full((), torch.iinfo(torch.int64).max, device=pl_module.device)
        loss = outputs["loss"].detach()
        step = torch.where(loss.isfinite(), torch.iinfo(torch.int64).max, trainer.global_step)
        torch.minimum(self._first_bad, step, out=self._first_bad)
        if trainer.is_last_batch:
            self._check(trainer)

    def _check(self, trainer: L.Trainer) -> None:
        assert self._first_bad is not None
        step = int(self._first_bad)
        if step < torch.iinfo(torch.int64).max:
            kept = (
                "checkpoints are those of the epoch before" if trainer.current_epoch else "there is no checkpoint yet"
            )
            clipped = "" if trainer.gradient_clip_val else "optimiser.clip=1.0, "
            raise Diverged(
                f"the loss became NaN or infinite in step {step}, in epoch {trainer.current_epoch + 1} of "
                f"{trainer.max_epochs}: {clipped}a lower optimiser.lr or a longer schedule.warmup may help; {kept}"
            )


class EpochSpeed(NamedTuple):
    """How many images were trained on in how many seconds, and how many of those were spent waiting for a batch."""

    images: int
    seconds: float
    waited: float

    @classmethod
    def of_all(cls, epochs: Sequence[EpochSpeed]) -> EpochSpeed:
        """Several epochs as one.

        Example:
            >>> EpochSpeed.of_all([EpochSpeed(100, 2.0, 0.5), EpochSpeed(100, 3.0, 0.5)]).images_per_second
            40.0
        """
        return cls(*(sum(figures) for figures in zip(*epochs, strict=True)))

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    @property
    def waiting(self) -> float:
        """The share of the time."""
        return self.waited / self.seconds


class Fetching(Profiler):
    """The seconds in which the training loop asked its loader for batches, as Lightning tells its profilers.

    What Lightning does between two steps is none of it.

    Example:
        >>> fetching = Fetching()
        >>> with fetching.profile("optimizer_step"):
        ...     time.sleep(0.001)
        >>> fetching.seconds
        0.0
        >>> with fetching.profile("[_TrainingEpochLoop].train_dataloader_next"):
        ...     time.sleep(0.001)
        >>> fetching.seconds >= 0.001
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self._start = 0.0

    def start(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self._start = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith("train_dataloader_next"):
            self.seconds += time.perf_counter() - self._start


class Speed(Callback):
    """Images a second in training, the share of the time in which the loop waited for the next batch, and memory.

    An epoch counts from its first batch to its last, without validation and checkpoints, which ``training_share``
    tells of; the first epoch of a process is left out of the results, since it compiles and warms up. Time to get a
    batch from its loader counts where a GPU has done all that it was given before: otherwise nothing waits.
    The trainer's profiler is to be :class:`Fetching`.
    """

    def __init__(self) -> None:
        self.fetching = Fetching()
        self.epochs: list[EpochSpeed] = []
        self._whole = 0.0
        self._start = self._fetched = 0.0
        self._pending = 0
        self._pending_wait = 0.0
        self._peak: int | None = None
        self._done: torch.cuda.Event | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        profiler = trainer.profiler  # type: ignore[attr-defined]
        self.fetching = profiler if isinstance(profiler, Fetching) else self.fetching
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if pl_module.device.type == "cuda":
            self._peak = torch.cuda.max_memory_allocated(pl_module.device)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _finish(pl_module.device)
        now = time.perf_counter()
        if len(self.epochs) > 1:
            self._whole += now - self._start
        self._start, self._fetched = now, self.fetching.seconds
        self._pending = 0
        self._pending_wait = 0.0
        self._done = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._done is None or self._done.query():
            self._pending_wait += self.fetching.seconds - self._fetched
        self._fetched = self.fetching.seconds

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._pending += len(batch[0]) * trainer.world_size
        if trainer.is_last_batch:
            _finish(pl_module.device)
            self.epochs.append(EpochSpeed(self._pending, time.perf_counter() - self._start, self._pending_wait))
        elif pl_module.device.type == "cuda":
            self._done = self._done or torch.cuda.Event()
            self._done.record()

    def results(self) -> dict[str, float | None]:
        """``images_per_second``, ``waiting_for_data`` and ``training_share``, ``None`` after a single epoch; and
        ``peak_bytes``, the most that PyTorch held on this process's GPU, ``None`` without one."""
        found: dict[str, float | None] = dict.fromkeys(("images_per_second", "waiting_for_data", "training_share"))
        found["peak_bytes"] = self._peak
        if len(self.epochs) > 1:
            counted = EpochSpeed.of_all(self.epochs[1:])
            found["images_per_second"] = round(counted.images_per_second, 1)
            found["waiting_for_data"] = round(counted.waiting, 4)
            if len(self.epochs) > 2:
                # The last epoch's end is not seen: as if it took as long as the others.
                whole = self._whole / (len(self.epochs) - 2) * (len(self.epochs) - 1)
                found["training_share"] = round(counted.seconds / whole, 4)
        return found


class History(Callback):
    """One row of figures for each epoch, kept in the checkpoint, so that a resumed run has its whole past."""

    def __init__(self, on_epoch: Callable[[list[dict[str, float]]], None] | None = None) -> None:
        self.rows: list[dict[str, float]] = []
        self.on_epoch = on_epoch
        self._validated = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validated = True

    # Lightning calls those that write checkpoints last, so this row is in them.
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        row: dict[str, float] = {"epoch": trainer.current_epoch + 1}
        # Between validations Lightning still has the figures of the last one.
        known = ("train/", "val/") if self._validated else ("train/",)
        row |= {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(known)}
        self._validated = False
        row["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        self.rows.append(row)
        if self.on_epoch and trainer.is_global_zero:
            self.on_epoch(self.rows)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
