"""A network in training that labels voxels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.models.files import Description
from kronattn.training.dice import MeanDice, dice_loss
from kronattn.training.halving import in_parts
from kronattn.training.learner import Learner
from kronattn.training.recipe import Recipe

__all__ = ["VolumeSegmenter"]


class VolumeSegmenter(Learner):
    """A network that learns to label voxels, after a recipe: (N, 1, D, H, W) to (N, classes, D, H, W).

    The loss is cross-entropy plus one minus Dice, as is usual where most voxels are background.
    """

    def __init__(self, network: nn.Module, recipe: Recipe, description: Description) -> None:
        super().__init__(network, recipe, description)
        self.ignore_index = description.ignore_index
        self.dice = MeanDice(len(description.classes), self.ignore_index)

    def losses(self, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        volumes, labels = batch
        logits = self.network(volumes).float()
        entropy = F.cross_entropy(
            logits, labels, ignore_index=self.ignore_index, label_smoothing=self.recipe.label_smoothing
        )
        return {"loss": entropy + dice_loss(logits, labels, self.ignore_index), "entropy": entropy}

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        volumes, labels = batch
        # Past the compiled call: volumes have sizes of their own here.
        logits = in_parts(self.network.forward, volumes).float()
        self.dice.update(logits.argmax(1), labels)
        loss = F.cross_entropy(logits, labels, ignore_index=self.ignore_index)
        self.log("val/loss", loss, on_epoch=True, batch_size=len(volumes), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val/dice", self.dice.compute(), prog_bar=True)
        self.dice.reset()
