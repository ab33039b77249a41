"""Fine-tuning in two steps: the new classifier learns first, and then everything."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import nn

from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.ops.compat import is_batch_norm
from kronattn.training.optimisation import head_of

__all__ = ["FreezeBackbone"]


class FreezeBackbone(Callback):
    """Keeps everything but the classifier (a segmenter's head) as it is for the first epochs, batch norms included.

    A new classifier's first gradients are large and mean little: they would undo what the features have learned.
    """

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self._frozen: bool | None = None

    # Not when an epoch starts, which Lightning leaves out of the one that a run is resumed with.
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        frozen = trainer.current_epoch < self.epochs
        if frozen != self._frozen or (frozen and batch_idx == 0):
            self._freeze(pl_module.network, frozen)  # type: ignore[arg-type]
            self._frozen = frozen

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._freeze(pl_module.network, False)  # type: ignore[arg-type]

    def _freeze(self, network: nn.Module, frozen: bool) -> None:
        head = head_of(network, "freeze_epochs")
        for parameter in network.parameters():
            parameter.requires_grad_(not frozen or parameter in head)
        for module in network.modules():
            # Statistics of batch norms would drift, too; a norm inside the head goes on learning.
            if isinstance(module, CoefficientNorm) or is_batch_norm(module):
                if set(module.parameters()) <= head:
                    continue
                module.train(not frozen)
