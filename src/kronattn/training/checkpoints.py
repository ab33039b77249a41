"""Checkpoints of a run: written whole or not at all, and read without executing anything in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from kronattn.atomic import replacing
from kronattn.models.files import DESCRIPTION_KEY
from kronattn.models.weights import unpack
from kronattn.training.host_copies import HostCopies

__all__ = ["WholeCheckpoints", "check_resumable"]


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's checkpoints by way of a temporary file in the same folder, written while training goes on.

    Lightning's own way has its temporary file elsewhere, from where it may be copied rather than renamed. Two
    checkpoints of the same step (the best is often the last) are one file under two names.

    A thread writes what was copied to the host's memory. What went wrong there is raised by the next checkpoint or by
    :meth:`finish`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: tuple[int, Path, Future[None]] | None = None
        self._copies = HostCopies()
        self._writer: ThreadPoolExecutor | None = None
        self._pending: list[Future[None]] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path, step = Path(path), checkpoint["global_step"]
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._latest is not None and self._latest[0] == step and self._latest[1] != path:
            written = self._submit(_link, *self._latest[1:], path)
        else:
            # The copies' memory is in use until the last checkpoint is written.
            self.finish()
            written = self._submit(_write, *self._copies(checkpoint), path)
        self._latest = (step, path, written)

    def finish(self) -> None:
        """Wait until everything is written; raises what went wrong."""
        pending, self._pending = self._pending, []
        for written in pending:
            written.result()

    def teardown(self) -> None:
        # Lightning may be on its way out with another error, which this must not hide.
        wait(self._pending)

    def _submit(self, job: Callable[..., None], *arguments: Any) -> Future[None]:
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        submitted = self._writer.submit(job, *arguments)
        self._pending.append(submitted)
        return submitted


def _write(checkpoint: dict[str, Any], arrived: Callable[[], None], path: Path) -> None:
    arrived()
    try:
        with replacing(path) as temporary:
            torch.save(checkpoint, temporary)
    except RuntimeError as error:
        # torch.save reports a full disk in a way of its own.
        raise OSError(f"the checkpoint {path} could not be written; the last one is whole ({error})") from None


def _link(other: Path, written: Future[None], path: Path) -> None:
    # Where the other could not be written, what lies there is an older one.
    written.result()
    with replacing(path) as temporary:
        temporary.unlink()
        os.link(other, temporary)


def check_resumable(path: Path, model: str) -> None:
    """Refuse a checkpoint that is not of this network, or holds more than tensors and plain values."""
    found = unpack(path)
    described = found.get(DESCRIPTION_KEY)
    if not isinstance(described, dict) or "state_dict" not in found:
        raise ValueError(f"{path} is not a checkpoint of a kronattn run")
    if described["model"] != model:
        raise ValueError(f"{path} is a checkpoint of {described['model']}, but the recipe trains {model}")
