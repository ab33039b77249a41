"""A segmentation head around any context layer: what differs between two of them is the layer alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from kronattn.nn.context_registry import context_builder
from kronattn.nn.segmentation import SegmentationHead, class_convolution

__all__ = ["ContextHead"]


class ContextHead(SegmentationHead):
    """Classes are read off the features and, side by side with them, off the context of the features.

    The layout of :class:`kronattn.nn.KroneckerSegmentationHead` for layers that keep their number of channels: a 1×1
    convolution to ``width``, the layer, and one classifier of both the features and the layer's output.

    Args:
        in_channels: of the features.
        num_classes: to tell apart.
        context: one of ``kronattn.nn.list_contexts()``, or what builds a layer from its number of channels. "none"
            leaves the context out: a classifier of the features by themselves.
        width: channels of the context; a quarter of ``in_channels`` by default.
        options: the layer's own, such as ``num_heads``.

    Shape:
        (N, in_channels, h, w) to (N, num_classes, h, w), or to (N, num_classes, *size) where ``size`` is given.

    Example:
        >>> ContextHead(64, 21, context="global_mean")(torch.randn(2, 64, 9, 12), size=(65, 90)).shape
        torch.Size([2, 21, 65, 90])
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        context: str | Callable[..., nn.Module] = "kao_kv",
        *,
        width: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(in_channels, num_classes)
        if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
            raise ValueError(f"width must be an int from 1 up, or None for a quarter of in_channels, not {width!r}")
        like: Mapping[str, Any] = {"device": device, "dtype": dtype}
        build = context_builder(context, **options)
        self.width = width or max(1, in_channels // 4)
        self.classifier = class_convolution(in_channels, num_classes, **like)
        self.reduce: nn.Conv2d | None = None
        self.context_classifier: nn.Conv2d | None = None
        # The name that the other heads have for it, by which the norms of coefficients are kept from weight decay.
        self.attn: nn.Module | None = None
        if context not in ("none", "identity"):  # neither has anything to classify
            self.reduce = nn.Conv2d(in_channels, self.width, 1, bias=False, **like)
            self.attn = build(self.width).to(**like)
            self.context_classifier = class_convolution(self.width, num_classes, bias=False, **like)

    def classifiers(self) -> list[nn.Conv2d]:
        return [conv for conv in (self.classifier, self.context_classifier) if conv is not None]

    def _new_classifiers(self, **like: Any) -> None:
        self.classifier = class_convolution(self.in_channels, self.num_classes, **like)
        if self.context_classifier is not None:
            self.context_classifier = class_convolution(self.width, self.num_classes, bias=False, **like)

    def scores(self, features: Tensor) -> Tensor:
        scores = self.classifier(features)
        if self.reduce is None or self.attn is None or self.context_classifier is None:
            return scores
        return scores + self.context_classifier(self.attn(self.reduce(features)))

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.num_classes}, width={self.width}"
