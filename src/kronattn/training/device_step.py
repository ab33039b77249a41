"""One whole step of training on the device: augmentation, forward, backward, optimiser, moving average.

The host hands it a batch and a few numbers (learning rates, the newest weights' share of the moving average). Those
numbers lie in tensors whose place does not change, and nothing in the step asks the device for a value: so a CUDA graph
can repeat it (:mod:`kronattn.training.graphs`). On any device it also runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["AUTOCAST", "DeviceStep"]

# By the recipe's precision. Not "16-mixed": its scaler decides on the host whether a step counts.
AUTOCAST: dict[str, torch.dtype | None] = {"32-true": None, "bf16-mixed": torch.bfloat16}

Batch = tuple[Tensor, ...]


class DeviceStep:
    """A step as a function of tensors.

    Args:
        prepare: a batch as the loader gives it to images and targets as the network wants them.
        losses: images and targets to the step's figures, scalars, ``"loss"`` among them.
        optimiser: moves the weights. On a GPU one that takes its learning rate from the device (``fused=True``).
        device: where all of it happens.
        precision: one of ``AUTOCAST``.
        clip: the largest norm of the gradient.
        blend: takes the new weights into their moving average with the given share, a scalar tensor.
    """

    def __init__(
        self,
        prepare: Callable[[Batch], Batch],
        losses: Callable[[Batch], Mapping[str, Tensor]],
        optimiser: Optimizer,
        *,
        device: torch.device,
        precision: str = "32-true",
        clip: float | None = None,
        blend: Callable[[Tensor], None] | None = None,
    ) -> None:
        self.prepare = prepare
        self.losses = losses
        self.optimiser = optimiser
        self.device = device
        self.autocast = AUTOCAST[precision]
        self.clip = clip
        self.blend = blend
        self.figures: tuple[str, ...] = ()
        self._rates = [_Number(device) for _ in optimiser.param_groups]
        self._share = _Number(device)

    def set_numbers(self, share: float) -> None:
        """Bring this step's learning rates and the share of its weights to the device, without waiting for it."""
        for rate, group in zip(self._rates, self.optimiser.param_groups, strict=True):
            rate.set(group["lr"])
        self._share.set(share)

    @torch.enable_grad()
    def __call__(self, *batch: Tensor) -> Tensor:
        """Take one step; the figures, (len(self.figures),), in the order of ``self.figures``."""
        kind = self.device.type
        self.optimiser.zero_grad(set_to_none=True)
        # Whoever calls may have autocast on: random crops and the optimiser are no work for half precision. Without its
        # cache, since a graph must cast the weights again at every repetition.
        with torch.autocast(kind, enabled=False):
            with torch.no_grad():
                prepared = self.prepare(batch)
            with torch.autocast(kind, self.autocast, self.autocast is not None, cache_enabled=False):
                figures = self.losses(prepared)
            figures["loss"].backward()
            if self.clip is not None:
                parameters = [p for group in self.optimiser.param_groups for p in group["params"]]
                torch.nn.utils.clip_grad_norm_(parameters, self.clip)
            self._move_weights()
            if self.blend is not None:
                self.blend(self._share.tensor)
        self.figures = tuple(figures)
        return torch.stack([figure.detach().float() for figure in figures.values()])

    def _move_weights(self) -> None:
        """The optimiser's step, with learning rates from the device; to all others they are numbers, as ever."""
        groups: list[dict[str, Any]] = self.optimiser.param_groups
        numbers = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate.tensor
            self.optimiser.step()
        finally:
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number


class _Number:
    """A number that the host sets and the device reads: a scalar tensor that stays where it is."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), device=device)
        self._value = 0.0

    def set(self, value: float) -> None:
        # Each is a launch, and most stay what they are for long.
        if value != self._value:
            self.tensor.fill_(value)
            self._value = value
