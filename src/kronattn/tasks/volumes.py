"""Volumes: a class for each voxel, (N, 1, D, H, W) to (N, classes, D, H, W)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kronattn.data.volume_augment import VolumeSettings
from kronattn.data.volumes import IGNORED
from kronattn.tasks.map_entropy import map_entropy
from kronattn.tasks.task import Interpretation, Task

if TYPE_CHECKING:
    from PIL import Image
    from torchmetrics import MetricCollection

    from kronattn.models.files import Description

__all__ = ["Volumes"]


class Volumes(Task):
    """A class for each voxel. The loss is cross-entropy plus one minus Dice, as usual where most is background.

    Example:
        >>> from kronattn.models.files import Description
        >>> Volumes().example(Description("unet3d", shape=[1, 32, 48, 32])).shape
        torch.Size([1, 1, 32, 48, 32])
    """

    settings = VolumeSettings
    data_module = "kronattn.training.volume_data:VolumeBatches"
    network = "unet3d"
    takes = "volumes"
    at_once = (1, 1)
    score, label = "dice", "mean Dice"
    figures = {"dice": "mean Dice"}  # noqa: RUF012 - a mapping that nobody changes
    per_class, class_label = ("voxels", "dice", "mean, without the first"), "Dice"
    cut, share, output = "own", "part of the volume", "scores"

    def describe(self, data: Any) -> dict[str, Any]:
        crop = list(data.images.crop)
        return {"shape": [1, *crop], "resize": max(crop), "size": max(crop), "ignore_index": IGNORED}

    def evaluated(self, description: Description, data: str) -> VolumeSettings:
        _, depth, height, width = description.shape
        return VolumeSettings(crop=(depth, height, width))

    def losses(
        self, network: nn.Module, batch: tuple[Tensor, ...], recipe: Any, description: Description
    ) -> dict[str, Tensor]:
        from kronattn.tasks.dice import dice_loss

        volumes, labels = batch
        logits = network(volumes).float()
        entropy = map_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=recipe.label_smoothing)
        return {"loss": entropy + dice_loss(logits, labels, IGNORED), "entropy": entropy}

    def loss(self, output: Tensor, target: Tensor, description: Description) -> Tensor:
        return map_entropy(output, target, ignore_index=IGNORED)

    def metrics(self, description: Description) -> MetricCollection:
        from torchmetrics import MetricCollection

        from kronattn.tasks.dice import MeanDice

        return MetricCollection({"dice": MeanDice(len(description.classes), IGNORED)})

    def all_metrics(self, description: Description) -> MetricCollection:
        from torchmetrics.classification import MulticlassConfusionMatrix

        from kronattn.tasks.dice import MeanDice

        classes = len(description.classes)
        found = self.metrics(description)
        found.add_metrics(
            {
                "class_dice": MeanDice(classes, IGNORED, by_class=True),
                "confusion": MulticlassConfusionMatrix(classes, ignore_index=IGNORED, validate_args=False),
            }
        )
        return found

    def class_scores(self, found: Mapping[str, Any]) -> list[float | None]:
        # A class that is nowhere has no Dice: it is not equal to itself.
        return [dice if dice == dice else None for dice in found["class_dice"]]

    def note(self, found: Mapping[str, Any]) -> str:
        return f"Each the mean over {found['images']} volumes."

    def interpret(self, output: Tensor, image: Image.Image, description: Description, top: int) -> Interpretation:
        raise ValueError(f"{description.model} is for volumes, and this is an image: kronattn evaluate takes volumes")

    def prepared(self, description: Description) -> str:
        return "A volume of any size, standardised by itself, is taken as it is"
