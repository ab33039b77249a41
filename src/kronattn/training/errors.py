"""What can go wrong with a run for want of memory, processes or kernels, in one line that says what to do."""

from __future__ import annotations

import torch

from kronattn.training.recipe import Recipe

__all__ = ["CannotTrain", "OneLineError", "explained", "one_line_of"]


class OneLineError(RuntimeError):
    """The command shows the message alone: there is nothing to find in a traceback."""

    one_line = True


class CannotTrain(OneLineError):
    """The machine cannot do what the recipe asks for."""


def explained(error: RuntimeError, recipe: Recipe, has_checkpoint: bool) -> CannotTrain | None:
    """An error of PyTorch's in words, or ``None`` if it is none of those that users can do something about.

    Example:
        >>> str(explained(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), Recipe(), False))
        'a process that prepares images was killed, often for want of memory: fewer data.workers may help; ...'
    """
    message = str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError):
        problem = (
            f"a step with batch_size {recipe.batch_size} does not fit into the GPU's memory: give a smaller batch_size"
        )
    elif "DataLoader worker" in message:
        problem = "a process that prepares images was killed, often for want of memory: fewer data.workers may help"
    elif recipe.deterministic and "deterministic" in message:
        problem = "not all of this can be computed with the same bits every time: leave deterministic out"
    else:
        return None
    rest = "--resume goes on from the last checkpoint" if has_checkpoint else "there is no checkpoint yet"
    return CannotTrain(f"{problem}; {rest} ({one_line_of(error)})")


def one_line_of(error: BaseException) -> str:
    """The first line of an error that has something to say; CUDA's go on with advice for developers."""
    lines = (" ".join(line.split()) for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)
