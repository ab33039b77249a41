"""A segmenter in training, and one under examination."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassJaccardIndex

from kronattn.models.files import Description
from kronattn.training.halving import in_parts
from kronattn.training.learner import Learner
from kronattn.training.recipe import Recipe

__all__ = ["SegmentationExamination", "Segmenter", "segmentation_scores"]


def segmentation_scores(classes: int, ignore_index: int, prefix: str = "") -> MetricCollection:
    """Pixel accuracy and mean intersection over union; pixels with the ignored label do not count, nor do classes that
    are neither there nor predicted.

    Example:
        >>> scores = segmentation_scores(2, 255)
        >>> scores.update(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, 255]]))
        >>> {name: float(value) for name, value in scores.compute().items()}
        {'mean_iou': 1.0, 'pixel_accuracy': 1.0}
    """
    shared: dict[str, Any] = {"ignore_index": ignore_index, "validate_args": False}
    return MetricCollection(
        {
            "pixel_accuracy": MulticlassAccuracy(classes, average="micro", **shared),
            "mean_iou": MulticlassJaccardIndex(classes, average="macro", **shared),
        },
        prefix=prefix,
        compute_groups=False,
    )


class Segmenter(Learner):
    """A network that learns to label pixels, after a recipe: (N, 3, H, W) to (N, classes, H, W)."""

    def __init__(self, network: nn.Module, recipe: Recipe, description: Description) -> None:
        super().__init__(network, recipe, description)
        self.ignore_index = description.ignore_index
        self.scores = segmentation_scores(len(description.classes), self.ignore_index, "val/")

    def losses(self, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        images, masks = batch
        logits = self.network(images)
        if self.recipe.deterministic:
            # PyTorch sums losses of maps in any order on a GPU, but not those of a list of pixels.
            logits, masks = logits.movedim(1, -1).flatten(0, -2), masks.flatten()
        smoothing = self.recipe.label_smoothing
        return {"loss": F.cross_entropy(logits, masks, ignore_index=self.ignore_index, label_smoothing=smoothing)}

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, masks = batch
        # Past the compiled call: images have sizes of their own here.
        logits = in_parts(self.network.forward, images).float()
        self.scores.update(logits.argmax(1), masks)
        loss = F.cross_entropy(logits, masks, ignore_index=self.ignore_index)
        self.log("val/loss", loss, on_epoch=True, batch_size=len(images), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.scores.compute(), prog_bar=True)
        self.scores.reset()


class SegmentationExamination(L.LightningModule):
    """A trained segmenter's scores on images with masks, and the first few predictions to look at."""

    def __init__(self, network: nn.Module, classes: int, ignore_index: int, pictures: int = 0) -> None:
        super().__init__()
        self.network = network
        self.pictures = pictures
        self.samples: list[tuple[Tensor, Tensor, Tensor]] = []
        shared: dict[str, Any] = {"ignore_index": ignore_index, "validate_args": False}
        self.scores = segmentation_scores(classes, ignore_index)
        self.scores.add_metrics(
            {
                "class_iou": MulticlassJaccardIndex(classes, average=None, **shared),
                "confusion": MulticlassConfusionMatrix(classes, **shared),
            }
        )

    def test_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        images, masks = batch
        predicted = self.network(images).argmax(1)
        self.scores.update(predicted, masks)
        for sample in zip(images, masks, predicted, strict=True):
            if len(self.samples) < self.pictures:
                image, mask, labels = sample
                self.samples.append((image.float().cpu(), mask.cpu(), labels.cpu()))

    def results(self) -> dict[str, Tensor]:
        """The scores, each over all pixels."""
        return {name: torch.as_tensor(value).cpu() for name, value in self.scores.compute().items()}
