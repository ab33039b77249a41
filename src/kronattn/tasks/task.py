"""What every part of kronattn has to know of a task, from its data to the card of a trained network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from kronattn.present import Cell, Column, Group, Table

if TYPE_CHECKING:
    from PIL import Image
    from torchmetrics import MetricCollection

    from kronattn.models.files import Description

__all__ = ["Finding", "Interpretation", "Task"]


@dataclass(frozen=True)
class Finding:
    """A class, and its share: its probability, or for segmentation its part of the image's area."""

    name: str
    share: float


class Interpretation(NamedTuple):
    """Findings, largest share first; for segmentation also an overlay and the labels as a palette image."""

    classes: list[Finding]
    picture: Image.Image | None = None
    mask: Image.Image | None = None


class Task(ABC):
    """A task: its data, its losses and metrics, and what is done with a trained network.

    Nothing here needs Lightning or torchmetrics before a network is trained or evaluated: prediction, explanation and
    export do without.
    """

    # Data.
    settings: type  # a dataclass: how samples are prepared, ``data.images`` of a recipe
    data_module: str  # the Lightning data module, "module:Class": named, so that prediction does not need Lightning
    network: str = "kanet_kv"  # that a recipe trains if it names none
    at_once: tuple[int, int]  # samples in a batch of evaluation, on a GPU and on a CPU

    # Metrics.
    score: str  # the one by which networks are judged, among those of ``metrics``
    label: str  # what readers call it
    figures: Mapping[str, str]  # all of ``metrics``, and what readers call them
    per_class: tuple[str, str, str]  # in ``report``: what is counted, a class's score, the name of the last row
    class_label: str  # what readers call a class's score

    # Use of a trained network.
    takes: str = "images"  # what it is shown
    cut: str  # how much of an image the network sees: :func:`kronattn.data.prepare.prepare_image`
    share: str  # what a finding's share is a share of
    output: str  # the name of an exported network's output
    draws: bool = False  # whether predictions are pictures
    where: str = "Predicted"  # how a sentence about the prediction at a position begins

    @abstractmethod
    def describe(self, data: Any) -> dict[str, Any]:
        """What the description of a trained network says of its images: arguments of ``Description``; ``data`` is the
        data module that it was trained with."""

    def example(self, description: Description) -> Tensor:
        """An input of the size that the network was trained for, to count multiply-adds with: zeros."""
        square = (description.options.get("in_chans", 3), description.size, description.size)
        return torch.zeros(1, *(description.shape or square))

    @abstractmethod
    def evaluated(self, description: Description, data: str) -> Any:
        """The ``settings`` by which a trained network's images are prepared; ``data`` is the kind of dataset."""

    @abstractmethod
    def losses(
        self, network: nn.Module, batch: tuple[Tensor, ...], recipe: Any, description: Description
    ) -> dict[str, Tensor]:
        """A batch to a training step's figures, scalars: ``"loss"`` and what is told beside it."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor, description: Description) -> Tensor:
        """The loss of validation."""

    @abstractmethod
    def metrics(self, description: Description) -> MetricCollection:
        """The metrics of validation."""

    @abstractmethod
    def all_metrics(self, description: Description) -> MetricCollection:
        """The metrics of ``kronattn evaluate``, a confusion matrix among them."""

    def predicted(self, output: Tensor) -> Tensor:
        """What metrics compare with the target."""
        return output.argmax(1)

    @abstractmethod
    def class_scores(self, found: Mapping[str, Any]) -> Sequence[float | None]:
        """Of what ``all_metrics`` found, each class's score."""

    def report(self, found: Mapping[str, Any], description: Description) -> dict[str, Any]:
        """What ``all_metrics`` found, as figures for a JSON object; tensors have become numbers and lists."""
        counted, score, _ = self.per_class
        counts = [sum(row) for row in found["confusion"]]
        scores = self.class_scores(found)
        return {
            counted: sum(counts),
            **{name: found[name] for name in self.figures},
            "classes": [
                {"name": name, counted: count, score: value}
                for name, count, value in zip(description.classes, counts, scores, strict=True)
            ],
        }

    @abstractmethod
    def note(self, found: Mapping[str, Any]) -> str:
        """What else ``report`` found, below the table of classes."""

    def scores_table(self, found: Mapping[str, Any]) -> Table:
        """The figures of ``report`` for readers: each class, and all together."""
        counted, score, total = self.per_class
        columns = {"Class": "name", counted.capitalize(): counted, self.class_label: score}

        def row(entry: Mapping[str, Any]) -> list[Cell]:
            share = entry[score]
            return [Cell(entry["name"]), Cell(f"{entry[counted]:,}"), Cell("–" if share is None else f"{share:.2%}")]

        everything = {"name": total, counted: found[counted], score: found[self.score]}
        groups = [Group("", [row(entry) for entry in found["classes"]]), Group("", [row(everything)])]
        heads = [Column(title, numeric=key != "name") for title, key in columns.items()]
        return Table(f"{found['model']} on {found['data']}", heads, groups, [self.note(found)])

    def check_takes_images(self, description: Description) -> None:
        """Refuse to show images to a network that is for something else: an error of its own would name shapes."""
        if self.takes != "images":
            raise ValueError(
                f"{description.model} is for {self.takes}, not for images: kronattn evaluate takes {self.takes}"
            )

    @abstractmethod
    def interpret(self, output: Tensor, image: Image.Image, description: Description, top: int) -> Interpretation:
        """What an image's output means: the ``top`` findings."""

    @abstractmethod
    def prepared(self, description: Description) -> str:
        """How an image is prepared, for a model card: the beginning of a sentence."""

    def logits_at(self, output: Tensor, place: tuple[float, float]) -> Tensor:
        """The logits of an image at a position, x and y as fractions: (num_classes,)."""
        return output

    def describe_prediction(
        self, output: Tensor, classes: Sequence[str], place: tuple[float, float], *, most: int = 3
    ) -> str:
        """A sentence on the output of one image, to stand above its attention.

        Args:
            output: of the network.
            classes: their names.
            place: x and y as fractions, for tasks that predict at each position.
            most: how many classes to name.
        """
        logits = self.logits_at(output, place)
        shares, numbers = logits.float().softmax(dim=0).topk(min(most, len(logits)))
        named = [class_name(classes, n) for n in numbers.tolist()]
        first, *others = zip(named, shares.tolist(), strict=True)
        rest = "; then " + ", ".join(f"{name} {share:.1%}" for name, share in others) if others else ""
        return f"{self.where}: {first[0]}, {first[1]:.1%} confident{rest}."


def class_name(classes: Sequence[str], number: int) -> str:
    """The name of a class, or its number where it has none.

    >>> class_name(["sky"], 0), class_name(["sky"], 1)
    ('sky', 'class 1')
    """
    return classes[number] if number < len(classes) else f"class {number}"
