"""What a recipe's ``compile`` means where a run takes place, and where compiled code is kept."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch

from kronattn.training.device_step import AUTOCAST
from kronattn.training.recipe import Recipe

__all__ = ["DECODED", "compile_mode", "graphs_unsupported_reason", "keep_compiled_code", "steps_on_device"]

log = logging.getLogger(__name__)

# Within a cache.
DECODED = "decoded"
# What PyTorch and Triton read where they keep their code, and the folders' names within a cache.
_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def steps_on_device(recipe: Recipe, device: torch.device) -> bool:
    """Whether whole training steps run on the device, to be captured as CUDA graphs: with "auto", on one GPU.

    Example:
        >>> steps_on_device(Recipe(), torch.device("cpu")), steps_on_device(Recipe(), torch.device("cuda", 0))
        (False, True)
    """
    if recipe.compile != "auto" or device.type != "cuda":
        return False
    from lightning.pytorch.utilities import rank_zero_only  # seconds, which others who ask this module do without

    reason = graphs_unsupported_reason(recipe)
    if reason is not None and rank_zero_only.rank == 0:  # type: ignore[attr-defined]
        log.warning("training without CUDA graphs: %s", reason)
    return reason is None


def graphs_unsupported_reason(recipe: Recipe) -> str | None:
    """Why whole steps of a recipe cannot be captured on a GPU, in words; None where they can."""
    if recipe.devices * recipe.nodes > 1:
        return "gradients of several devices are put together by the host"
    if recipe.precision not in AUTOCAST:
        return f"precision {recipe.precision} decides on the host whether a step counts; bf16-mixed does not"
    if recipe.freeze_epochs:
        return "freeze_epochs changes what is learned from one epoch to another"
    return None


def compile_mode(recipe: Recipe) -> str | None:
    """The mode of torch.compile, "default" for its own; ``None`` where the network is not compiled.

    Example:
        >>> [compile_mode(Recipe(compile=setting)) for setting in ("auto", False, True, "max-autotune")]
        [None, None, 'default', 'max-autotune']
    """
    if recipe.compile in (False, "auto"):
        return None
    return recipe.compile if isinstance(recipe.compile, str) else "default"


def keep_compiled_code(cache: Path) -> None:
    """Have PyTorch and Triton keep what they compile below ``cache``, unless the environment says where."""
    for variable, name in _FOLDERS.items():
        os.environ.setdefault(variable, str((cache / name).resolve()))
