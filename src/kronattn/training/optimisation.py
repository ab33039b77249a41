"""Optimisers and schedules, from their settings."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from kronattn.training.recipe import OptimiserSettings, ScheduleSettings

__all__ = ["build_optimiser", "build_schedule", "head_of", "learning_rate_factor"]

_WARMUP_START = 0.01


def build_optimiser(network: nn.Module, settings: OptimiserSettings, *, capturable: bool = False) -> Optimizer:
    """The optimiser of a network's parameters, in groups: those that decay and those that do not, the head's apart
    where it learns at a rate of its own. A ``capturable`` one can be part of a CUDA graph."""
    spared = network.no_weight_decay() if hasattr(network, "no_weight_decay") else set()  # type: ignore[operator]
    head = head_of(network) if settings.head_factor != 1 else set()
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            decays = settings.decay_vectors or (parameter.dim() > 1 and name not in spared)
            in_head = parameter in head
            groups.setdefault((in_head, decays), []).append(parameter)
    arguments: list[dict[str, Any]] = [
        {
            "params": parameters,
            "lr": settings.lr * (settings.head_factor if in_head else 1),
            "weight_decay": settings.weight_decay if decays else 0.0,
        }
        for (in_head, decays), parameters in sorted(groups.items(), key=lambda group: (group[0][0], not group[0][1]))
    ]
    if settings.name == "adamw":
        return AdamW(arguments, lr=settings.lr, fused=capturable or None, capturable=capturable)
    # Fused: the only form of SGD whose kernels read the learning rate on the device.
    return SGD(
        arguments, lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov, fused=capturable or None
    )


def head_of(network: nn.Module, wanted_by: str = "optimiser.head_factor") -> set[nn.Parameter]:
    """What reads the answer off the features: a classifier's last layer (timm's convention), a segmenter's head."""
    find = getattr(network, "get_classifier", None)
    head = find() if find is not None else getattr(network, "head", None)
    if not isinstance(head, nn.Module):
        raise ValueError(f"{wanted_by} needs a network with a head; {type(network).__name__} shows none")
    return set(head.parameters())


def learning_rate_factor(settings: ScheduleSettings, epoch: float, epochs: float) -> float:
    """What the learning rate is multiplied with after so many epochs, which need not be whole.

    Example:
        >>> steps = ScheduleSettings("steps", milestones=[80, 105, 120])
        >>> [round(learning_rate_factor(steps, epoch, 150), 6) for epoch in (0, 79.99, 80, 105, 149)]
        [1.0, 1.0, 0.1, 0.01, 0.001]
        >>> learning_rate_factor(ScheduleSettings("cosine"), 50, 100)
        0.5
    """
    if epoch < settings.warmup:
        return _WARMUP_START + (1 - _WARMUP_START) * epoch / settings.warmup
    if settings.name == "steps":
        return 0.1 ** sum(epoch >= milestone for milestone in settings.milestones)
    # A run may end within its warm-up: a short trial of a long recipe.
    rest = epochs - settings.warmup
    done = min(1.0, (epoch - settings.warmup) / rest) if rest > 0 else 1.0
    if settings.name == "cosine":
        return round(0.5 * (1 + math.cos(math.pi * done)), 12)
    return (1 - done) ** settings.power


def build_schedule(optimiser: Optimizer, settings: ScheduleSettings, epochs: float, steps_per_epoch: int) -> LambdaLR:
    """The schedule, to be advanced after every step; a run of iterations need not end with an epoch."""
    return LambdaLR(optimiser, lambda step: learning_rate_factor(settings, step / steps_per_epoch, epochs))
