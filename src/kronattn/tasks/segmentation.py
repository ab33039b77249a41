"""Segmentation: a class for each pixel, (N, C, H, W) to (N, classes, H, W)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.data.joint import JointSettings
from kronattn.tasks.map_entropy import map_entropy
from kronattn.tasks.task import Finding, Interpretation, Task, class_name

if TYPE_CHECKING:
    from PIL import Image
    from torchmetrics import MetricCollection

    from kronattn.models.files import Description

__all__ = ["Segmentation"]


class Segmentation(Task):
    """A class for each pixel.

    Example:
        >>> from kronattn.models.files import Description
        >>> metrics = Segmentation().metrics(Description("m", classes=["sky", "road"]))
        >>> metrics.update(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, 255]]))
        >>> {name: float(value) for name, value in metrics.compute().items()}
        {'mean_iou': 1.0, 'pixel_accuracy': 1.0}
    """

    settings = JointSettings
    data_module = "kronattn.training.mask_data:MaskData"
    network = "deeplabv2_kao_kv"
    at_once = (8, 1)
    score, label = "mean_iou", "mean IoU"
    figures = {"mean_iou": "mean IoU", "pixel_accuracy": "pixel accuracy"}  # noqa: RUF012 - as above
    per_class, class_label = ("pixels", "iou", "mean"), "IoU"
    cut, share, output = "own", "part of the area", "scores"
    draws = True
    where = "Predicted at the marked position"

    def describe(self, data: Any) -> dict[str, Any]:
        labels, crop = data.labels, data.settings.images.crop
        return {
            "resize": crop,
            "size": crop,
            "ignore_index": labels.ignore_index,
            "palette": [list(colour) for colour in labels.colours()],
        }

    def evaluated(self, description: Description, data: str) -> JointSettings:
        # Other kinds of data know their own ignored label.
        ignored: dict[str, Any] = {"ignore_index": description.ignore_index} if data == "folder" else {}
        return JointSettings(mean=tuple(description.mean), std=tuple(description.std), **ignored)  # type: ignore[arg-type]

    def losses(
        self, network: nn.Module, batch: tuple[Tensor, ...], recipe: Any, description: Description
    ) -> dict[str, Tensor]:
        images, masks = batch
        ignored, smoothing = description.ignore_index, recipe.label_smoothing
        return {"loss": map_entropy(network(images), masks, ignore_index=ignored, label_smoothing=smoothing)}

    def loss(self, output: Tensor, target: Tensor, description: Description) -> Tensor:
        return map_entropy(output, target, ignore_index=description.ignore_index)

    def metrics(self, description: Description) -> MetricCollection:
        """Ignored pixels do not count, nor do classes that are neither there nor predicted."""
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

        classes, shared = _arguments(description)
        return MetricCollection(
            {
                "pixel_accuracy": MulticlassAccuracy(classes, average="micro", **shared),
                "mean_iou": MulticlassJaccardIndex(classes, average="macro", **shared),
            },
            compute_groups=False,
        )

    def all_metrics(self, description: Description) -> MetricCollection:
        from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassJaccardIndex

        classes, shared = _arguments(description)
        found = self.metrics(description)
        found.add_metrics(
            {
                "class_iou": MulticlassJaccardIndex(classes, average=None, **shared),
                "confusion": MulticlassConfusionMatrix(classes, **shared),
            }
        )
        return found

    def class_scores(self, found: Mapping[str, Any]) -> list[float]:
        return found["class_iou"]

    def note(self, found: Mapping[str, Any]) -> str:
        return f"Pixel accuracy: {found['pixel_accuracy']:.2%}, on {found['images']} images. Ignored pixels are out."

    def interpret(self, output: Tensor, image: Image.Image, description: Description, top: int) -> Interpretation:
        """Scores at any resolution to each class's part of the area, an overlay and the labels, both of the image's
        size."""
        import numpy as np
        from PIL import Image

        from kronattn.present.legend import colours_of

        size = (image.height, image.width)
        labels = F.interpolate(output.unsqueeze(0), size, mode="bilinear", align_corners=False)[0].argmax(0).numpy()
        counts = np.bincount(labels.ravel(), minlength=len(output)) / labels.size
        largest = np.argsort(-counts, kind="stable")[:top]
        found = [Finding(class_name(description.classes, int(n)), float(counts[n])) for n in largest if counts[n] > 0]
        colours = np.array(colours_of(description, len(output)), dtype=np.uint8)
        mask = Image.fromarray(labels.astype(np.uint8))
        mask.putpalette(colours.tobytes())
        return Interpretation(found, Image.blend(image, Image.fromarray(colours[labels]), 0.55), mask)

    def logits_at(self, output: Tensor, place: tuple[float, float]) -> Tensor:
        height, width = output.shape[1:]
        return output[:, min(int(place[1] * height), height - 1), min(int(place[0] * width), width - 1)]

    def prepared(self, description: Description) -> str:
        return "An image of any size is taken as it is"


def _arguments(description: Description) -> tuple[int, dict[str, Any]]:
    """Those that all metrics of pixels take."""
    return len(description.classes), {"ignore_index": description.ignore_index, "validate_args": False}
