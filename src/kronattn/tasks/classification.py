"""Classification: an image to its class, (N, C, H, W) to (N, classes)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.data.transforms import ImageSettings
from kronattn.tasks.task import Finding, Interpretation, Task, class_name

if TYPE_CHECKING:
    from PIL import Image
    from torchmetrics import MetricCollection

    from kronattn.models.files import Description

__all__ = ["Classification"]

_TOP = 5


class Classification(Task):
    """An image to its class.

    Example:
        >>> from PIL import Image
        >>> from kronattn.models.files import Description
        >>> pets, task = Description("kanet_kv", classes=["cat", "dog", "fish"]), Classification()
        >>> task.interpret(torch.tensor([0.0, 2.0, 1.0]), Image.new("RGB", (8, 8)), pets, 2).classes
        [Finding(name='dog', share=0.665...), Finding(name='fish', share=0.244...)]
        >>> task.describe_prediction(torch.tensor([0.0, 3.0, 1.0]), pets.classes, (0.5, 0.5), most=2)
        'Predicted: dog, 84.4% confident; then fish 11.4%.'
    """

    settings = ImageSettings
    data_module = "kronattn.training.image_data:ImageData"
    # On a CPU small batches stay in its caches: 16 images at 192² go through kanet_kv 2.7 times as fast as 256 (one
    # thread).
    at_once = (256, 16)
    score, label = "top1", "top-1"
    figures = {"top1": "top-1", "top5": "top-5"}  # noqa: RUF012 - a mapping that nobody changes
    per_class, class_label = ("images", "top1", "all"), "Top-1"
    cut, share, output = "centre", "probability", "logits"

    def describe(self, data: Any) -> dict[str, Any]:
        images = data.images
        return {
            "resize": images.evaluated_resize,
            "size": images.evaluated_size,
            "keep_aspect": images.keep_aspect,
        }

    def evaluated(self, description: Description, data: str) -> ImageSettings:
        return ImageSettings(
            resize=description.resize,
            size=description.size,
            keep_aspect=description.keep_aspect,
            mean=tuple(description.mean),  # type: ignore[arg-type]
            std=tuple(description.std),  # type: ignore[arg-type]
        )

    def losses(
        self, network: nn.Module, batch: tuple[Tensor, ...], recipe: Any, description: Description
    ) -> dict[str, Tensor]:
        images, labels = batch
        logits = network(images)
        loss = F.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
        wanted = labels.argmax(1) if labels.dim() > 1 else labels
        return {"loss": loss, "top1": (logits.detach().argmax(1) == wanted).float().mean()}

    def loss(self, output: Tensor, target: Tensor, description: Description) -> Tensor:
        return F.cross_entropy(output, target)

    def metrics(self, description: Description) -> MetricCollection:
        from torchmetrics import MetricCollection

        classes = len(description.classes)
        found = MetricCollection({"top1": _accuracy(classes)})
        if classes > _TOP:
            found.add_metrics({"top5": _accuracy(classes, _TOP)})
        return found

    def all_metrics(self, description: Description) -> MetricCollection:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassCalibrationError, MulticlassConfusionMatrix

        classes = len(description.classes)
        return MetricCollection(
            {
                "top1": _accuracy(classes),
                "top5": _accuracy(classes, min(_TOP, classes)),
                "confusion": MulticlassConfusionMatrix(classes, validate_args=False),
                "calibration_error": MulticlassCalibrationError(classes, n_bins=15, validate_args=False),
            },
            compute_groups=False,
        )

    def predicted(self, output: Tensor) -> Tensor:
        return output.float().softmax(1)

    def class_scores(self, found: Mapping[str, Any]) -> list[float | None]:
        return [row[at] / sum(row) if sum(row) else None for at, row in enumerate(found["confusion"])]

    def report(self, found: Mapping[str, Any], description: Description) -> dict[str, Any]:
        return {**super().report(found, description), "calibration_error": found["calibration_error"]}

    def note(self, found: Mapping[str, Any]) -> str:
        return f"Top-5: {found['top5']:.2%}. Expected calibration error: {found['calibration_error']:.2%}."

    def interpret(self, output: Tensor, image: Image.Image, description: Description, top: int) -> Interpretation:
        shares, numbers = output.softmax(dim=0).topk(min(top, len(output)))
        found = zip(numbers.tolist(), shares.tolist(), strict=True)
        return Interpretation([Finding(class_name(description.classes, number), share) for number, share in found])

    def prepared(self, description: Description) -> str:
        square = "The square in the middle of an image" if description.keep_aspect else "An image"
        size, resize = description.size, description.resize
        return f"{square} is scaled to {resize} × {resize}, its centre of {size} × {size} taken"


def _accuracy(classes: int, top: int = 1) -> Any:
    from torchmetrics.classification import MulticlassAccuracy

    return MulticlassAccuracy(classes, top_k=top, average="micro", validate_args=False)
