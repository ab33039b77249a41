"""A classifier in training, and one under examination."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassCalibrationError,
    MulticlassConfusionMatrix,
)

from kronattn.models.files import DESCRIPTION_KEY, Description
from kronattn.training.optimisation import build_optimiser, build_schedule
from kronattn.training.recipe import Recipe, recipe_yaml

__all__ = ["Classifier", "Examination"]

TOP = 5


class Classifier(L.LightningModule):
    """A network that learns to name images, after a recipe.

    Args:
        network: (N, 3, H, W) to (N, classes).
        recipe: decides loss, optimiser and schedule.
        description: goes into every checkpoint, so that it can be used without the recipe.
    """

    def __init__(self, network: nn.Module, recipe: Recipe, description: Description) -> None:
        super().__init__()
        self.network = network
        self.recipe = recipe
        self.description = description
        classes = len(description.classes)
        self.scores = MetricCollection({"top1": _accuracy(classes)}, prefix="val/")
        if classes > TOP:
            self.scores.add_metrics({"top5": _accuracy(classes, TOP)})

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        logits = self.network(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
        wanted = labels.argmax(1) if labels.dim() > 1 else labels
        accuracy = (logits.detach().argmax(1) == wanted).float().mean()
        self.log("train/loss", loss.detach(), on_step=False, on_epoch=True, prog_bar=True, batch_size=len(images))
        self.log("train/top1", accuracy, on_step=False, on_epoch=True, batch_size=len(images))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        # Past the compiled call: the last batch is smaller, and compiling for it would take longer than it runs.
        logits = self.network.forward(images).float()
        self.scores.update(logits, labels)
        loss = F.cross_entropy(logits, labels)
        self.log("val/loss", loss, on_epoch=True, batch_size=len(images), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.scores.compute(), prog_bar=True)
        self.scores.reset()

    def configure_optimizers(self) -> Any:
        optimiser = build_optimiser(self.network, self.recipe.optimiser)
        steps = int(self.trainer.estimated_stepping_batches) // self.recipe.epochs
        schedule = build_schedule(optimiser, self.recipe.schedule, self.recipe.epochs, steps)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[DESCRIPTION_KEY] = self.description.to_dict()
        checkpoint["recipe"] = recipe_yaml(self.recipe)


class Examination(L.LightningModule):
    """A trained network's scores on labelled images: how often it is right, and how right its confidence is."""

    def __init__(self, network: nn.Module, classes: int) -> None:
        super().__init__()
        self.network = network
        self.scores = MetricCollection(
            {
                "top1": _accuracy(classes),
                "top5": _accuracy(classes, min(TOP, classes)),
                "confusion": MulticlassConfusionMatrix(classes, validate_args=False),
                "calibration_error": MulticlassCalibrationError(classes, n_bins=15, validate_args=False),
            },
            compute_groups=False,
        )

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        self.scores.update(self.network(images).float().softmax(1), labels)

    def results(self) -> dict[str, Tensor]:
        """The scores, each over all images."""
        return {name: torch.as_tensor(value).cpu() for name, value in self.scores.compute().items()}


def _accuracy(classes: int, top: int = 1) -> MulticlassAccuracy:
    return MulticlassAccuracy(classes, top_k=top, average="micro", validate_args=False)
