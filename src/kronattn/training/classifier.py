"""A classifier in training, and one under examination."""

from __future__ import annotations

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

from kronattn.models.files import Description
from kronattn.training.halving import in_parts
from kronattn.training.learner import Learner
from kronattn.training.recipe import Recipe

__all__ = ["Classifier", "Examination"]

TOP = 5


class Classifier(Learner):
    """A network that learns to name images, after a recipe: (N, 3, H, W) to (N, classes)."""

    def __init__(self, network: nn.Module, recipe: Recipe, description: Description) -> None:
        super().__init__(network, recipe, description)
        classes = len(description.classes)
        self.scores = MetricCollection({"top1": _accuracy(classes)}, prefix="val/")
        if classes > TOP:
            self.scores.add_metrics({"top5": _accuracy(classes, TOP)})

    def losses(self, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        images, labels = batch
        logits = self.network(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)
        wanted = labels.argmax(1) if labels.dim() > 1 else labels
        accuracy = (logits.detach().argmax(1) == wanted).float().mean()
        return {"loss": loss, "top1": accuracy}

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, labels = batch
        # Past the compiled call: the last batch is smaller, and compiling for it would take longer than it runs.
        logits = in_parts(self.network.forward, images).float()
        self.scores.update(logits, labels)
        loss = F.cross_entropy(logits, labels)
        self.log("val/loss", loss, on_epoch=True, batch_size=len(images), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.scores.compute(), prog_bar=True)
        self.scores.reset()


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
