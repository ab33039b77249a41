"""A network in training, whatever it learns: its optimiser, its schedule, and what its checkpoints say."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from kronattn.models.files import DESCRIPTION_KEY, Description
from kronattn.training.optimisation import build_optimiser, build_schedule
from kronattn.training.recipe import Recipe, recipe_yaml

__all__ = ["Learner"]


class Learner(L.LightningModule):
    """What the tasks' modules have in common.

    A task's module adds ``training_step``, which notes its figures, ``validation_step``, and the figures that it logs
    as ``val/...``.

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
        self._noted: dict[str, list[Tensor]] = {}
        self._images: list[int] = []

    def configure_optimizers(self) -> Any:
        optimiser = build_optimiser(self.network, self.recipe.optimiser)
        # Lightning's own count would start the loaders' workers before a resumed run knows its epoch.
        per_epoch = self.trainer.datamodule.steps_per_epoch()  # type: ignore[attr-defined]
        epochs = self.recipe.iterations / per_epoch if self.recipe.iterations else self.recipe.epochs
        schedule = build_schedule(optimiser, self.recipe.schedule, epochs, per_epoch)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def note(self, images: int, **figures: Tensor) -> None:
        """A training step's figures for so many images; their means over the epoch's are logged as ``train/...``.

        With the epoch's last step alone: Lightning's logging of every one takes the host a good part of a step's time.
        """
        self._images.append(images)
        for name, figure in figures.items():
            self._noted.setdefault(name, []).append(figure.detach())
        if not (self.trainer.is_last_batch or self.trainer.global_step + 1 == self.trainer.max_steps):
            return
        for name, noted in self._noted.items():
            every = torch.stack(noted)
            shares = every.new_tensor(self._images) / sum(self._images)
            self.log(f"train/{name}", (every * shares).sum(), on_step=False, on_epoch=True, prog_bar=name == "loss")
        self._noted, self._images = {}, []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[DESCRIPTION_KEY] = self.description.to_dict()
        checkpoint["recipe"] = recipe_yaml(self.recipe)
