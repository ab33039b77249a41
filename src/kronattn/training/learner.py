"""A network in training, whatever it learns: its optimiser, its schedule, and what its checkpoints say."""

from __future__ import annotations

from typing import Any

import lightning as L
from torch import nn

from kronattn.models.files import DESCRIPTION_KEY, Description
from kronattn.training.optimisation import build_optimiser, build_schedule
from kronattn.training.recipe import Recipe, recipe_yaml

__all__ = ["Learner"]


class Learner(L.LightningModule):
    """What the tasks' modules have in common.

    A task's module adds ``training_step``, ``validation_step`` and the figures it logs as ``val/...``.

    Args:
        network: what is trained.
        recipe: decides loss, optimiser and schedule.
        description: goes into every checkpoint, so that it can be used without the recipe.
    """

    def __init__(self, network: nn.Module, recipe: Recipe, description: Description) -> None:
        super().__init__()
        self.network = network
        self.recipe = recipe
        self.description = description

    def configure_optimizers(self) -> Any:
        optimiser = build_optimiser(self.network, self.recipe.optimiser)
        # Lightning's own count would start the loaders' workers before a resumed run knows its epoch.
        per_epoch = self.trainer.datamodule.steps_per_epoch()  # type: ignore[attr-defined]
        epochs = self.recipe.iterations / per_epoch if self.recipe.iterations else self.recipe.epochs
        schedule = build_schedule(optimiser, self.recipe.schedule, epochs, per_epoch)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[DESCRIPTION_KEY] = self.description.to_dict()
        checkpoint["recipe"] = recipe_yaml(self.recipe)
