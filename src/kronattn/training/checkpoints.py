"""Checkpoints of a run: written whole or not at all, and read without executing anything in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from kronattn.atomic import replacing
from kronattn.models.files import DESCRIPTION_KEY
from kronattn.models.weights import unpack

__all__ = ["WholeCheckpoints", "check_resumable"]


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's checkpoints by way of a temporary file in the same folder.

    Lightning's own way has its temporary file elsewhere, from where it may be copied rather than renamed. Two
    checkpoints of the same step (the best is often the last) are one file under two names.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: tuple[int, Path] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path, step = Path(path), checkpoint["global_step"]
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with replacing(path) as temporary:
                if self._latest is not None and self._latest[0] == step and self._latest[1] != path:
                    temporary.unlink()
                    os.link(self._latest[1], temporary)
                else:
                    torch.save(checkpoint, temporary)
            self._latest = (step, path)
        except RuntimeError as error:
            # torch.save reports a full disk in a way of its own.
            raise OSError(f"the checkpoint {path} could not be written; the last one is whole ({error})") from None


def check_resumable(path: Path, model: str) -> None:
    """Refuse a checkpoint that is not of this network, or holds more than tensors and plain values."""
    found = unpack(path)
    described = found.get(DESCRIPTION_KEY)
    if not isinstance(described, dict) or "state_dict" not in found:
        raise ValueError(f"{path} is not a checkpoint of a kronattn run")
    if described["model"] != model:
        raise ValueError(f"{path} is a checkpoint of {described['model']}, but the recipe trains {model}")
