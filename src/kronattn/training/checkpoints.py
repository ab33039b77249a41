"""Checkpoints of a run: written whole or not at all, and read without executing anything in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from kronattn.atomic import link_atomically, replacing
from kronattn.models.files import DESCRIPTION_KEY
from kronattn.models.weights import unpack
from kronattn.training.host_copies import HostCopies
from kronattn.training.recipe import ModelSettings

__all__ = ["WholeCheckpoints", "check_resumable"]


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's checkpoints by way of a temporary file in the same folder, written while training goes on.

    Lightning's own way has its temporary file elsewhere, from where it may be copied rather than renamed. Two
    checkpoints of the same step (the best is often the last) are one file under two names.

    A thread writes what was copied to the host's memory. A checkpoint that is still waiting to be written when the next
    one for the same file comes is left out: training never waits for the disk. What went wrong is raised by a later
    checkpoint or by :meth:`finish`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: tuple[int, Path] | None = None
        self._waiting: dict[Path, _Job] = {}
        self._written: dict[Path, int] = {}
        self._spare: list[HostCopies] = []
        self._lock = Lock()
        self._writer: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path, step = Path(path), checkpoint["global_step"]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._raise_errors([written for written in self._pending if written.done()])
        if self._latest is not None and self._latest[0] == step and self._latest[1] != path:
            job = _Job(step, link_to=self._latest[1])
        else:
            copies = self._spare.pop() if self._spare else HostCopies()
            job = _Job(step, *copies(checkpoint), copies=copies)
        self._latest = (step, path)
        self._submit(path, job)

    def finish(self) -> None:
        """Wait until everything is written; raises what went wrong."""
        self._raise_errors(self._pending)

    def teardown(self) -> None:
        # Lightning may be on its way out with another error, which this must not hide: finish raises what went wrong.
        if self._writer is not None:
            self._writer.shutdown()
            self._writer = None

    def _raise_errors(self, finished: list[Future[None]]) -> None:
        self._pending = [written for written in self._pending if written not in finished]
        for written in finished:
            written.result()

    def _submit(self, path: Path, job: _Job) -> None:
        with self._lock:
            left_out = self._waiting.get(path)
            self._waiting[path] = job
        if left_out is not None:
            self._reuse(left_out)
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending.append(self._writer.submit(self._write, path))

    def _write(self, path: Path) -> None:
        with self._lock:
            job = self._waiting.pop(path)
        if job.link_to is None:
            _save(job, path)
        elif self._written.get(job.link_to) == job.step:
            link_atomically(job.link_to, path)
        else:
            return  # the other could not be written, which is told of already
        self._written[path] = job.step
        self._reuse(job)

    def _reuse(self, job: _Job) -> None:
        if job.copies is not None:
            self._spare.append(job.copies)


class _Job(NamedTuple):
    """What becomes of a file: a checkpoint, whose tensors lie in ``copies`` once ``arrived`` returns, or a link."""

    step: int
    checkpoint: Any = None
    arrived: Callable[[], None] | None = None
    copies: HostCopies | None = None
    link_to: Path | None = None


def _save(job: _Job, path: Path) -> None:
    assert job.arrived is not None
    job.arrived()
    try:
        with replacing(path) as temporary:
            torch.save(job.checkpoint, temporary)
    except RuntimeError as error:
        # torch.save reports a full disk in a way of its own.
        raise OSError(f"the checkpoint {path} could not be written; the last one is whole ({error})") from None


def check_resumable(path: Path, model: ModelSettings) -> None:
    """Refuse a checkpoint that is not of this network, or holds more than tensors and plain values."""
    found = unpack(path)
    described = found.get(DESCRIPTION_KEY)
    if not isinstance(described, dict) or "state_dict" not in found:
        raise ValueError(f"{path} is not a checkpoint of a kronattn run")
    if described["model"] != model.name:
        raise ValueError(f"{path} is a checkpoint of {described['model']}, but the recipe trains {model.name}")
    given, used = (_own_options(options) for options in (model.all_options, described.get("options", {})))
    if given != used:
        raise ValueError(f"{path} is of a network with the options {used}, but the recipe has {given}")


def _own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipe says of a network: the number of classes comes from the data."""
    return {name: value for name, value in options.items() if name != "num_classes"}
