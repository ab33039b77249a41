"""DeepLabV2: a backbone at output stride 8, a head, and the scores at the size of the image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.models.deeplab.backbones import build_backbone
from kronattn.models.deeplab.context_head import ContextHead
from kronattn.models.deeplab.weights import load_backbone_weights
from kronattn.models.inputs import checked_input
from kronattn.nn.segmentation import AtrousPyramidHead, DenseSegmentationHead, KroneckerSegmentationHead, resize_scores

__all__ = ["HEADS", "SEGMENTERS", "DeepLabV2"]

HEADS: dict[str, Callable[..., nn.Module]] = {
    "aspp": AtrousPyramidHead,
    "attn": DenseSegmentationHead,
    "kao_kv": partial(KroneckerSegmentationHead, mode="kv"),
    "kao_qkv": partial(KroneckerSegmentationHead, mode="qkv"),
}


class DeepLabV2(nn.Module):
    """DeepLabV2 with its own head (ASPP), or with regular or Kronecker attention in its place.

    Args:
        head: a name in ``HEADS``, or what builds a head from its numbers of channels and classes, which keeps the size
            of the features.
        num_classes: 21 in PASCAL VOC: 20 and the background.
        in_chans: channels of the image.
        backbone: "resnet101" (the paper's), "resnet50", "resnet18", ..., or "kanet_kv" and its relatives.
        output_stride: of the features: 8 (DeepLabV2's) or 16.
        freeze_norm: keep the backbone's batch norms as they are, in training too: for small batches on top of
            pretrained weights.
        head_width: channels that Q, K and V are mapped to; a quarter of the features' by default. ASPP has none.
        context: what takes the place of the head's attention, in a :class:`ContextHead`: one of
            ``kronattn.nn.list_contexts()``, or what builds a layer from its number of channels. ASPP has none.
        context_options: the context layer's own, such as ``num_heads``.
        head_options: others of the head's own, such as ``num_heads``.
        backbone_weights: a file, see :func:`kronattn.models.load_backbone_weights`.
        backbone_options: of the backbone's own, such as ``width`` of a KANet.

    Shape:
        (N, in_chans, H, W) of any H and W to (N, num_classes, H, W).

    Example:
        >>> model = DeepLabV2("kao_kv", backbone="kanet_kv", backbone_options={"width": 0.25}, num_classes=11)
        >>> model(torch.randn(2, 3, 65, 90)).shape
        torch.Size([2, 11, 65, 90])
    """

    def __init__(
        self,
        head: str | Callable[..., nn.Module] = "kao_kv",
        *,
        num_classes: int = 21,
        in_chans: int = 3,
        backbone: str = "resnet101",
        output_stride: int = 8,
        freeze_norm: bool = False,
        head_width: int | None = None,
        context: str | Callable[..., nn.Module] | None = None,
        context_options: Mapping[str, Any] | None = None,
        head_options: Mapping[str, Any] | None = None,
        backbone_weights: str | Path | None = None,
        backbone_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        options = dict(head_options or {})
        if head_width is not None:
            if head == "aspp":
                raise ValueError("head_width has no meaning for ASPP, whose convolutions go straight to the classes")
            options["width"] = head_width
        if isinstance(head, str) and head not in HEADS:
            raise ValueError(f"head must be one of {', '.join(HEADS)}, not {head!r}")
        if context is not None:
            if head == "aspp":
                raise ValueError(f"ASPP has no attention that context={context!r} could take the place of")
            head = partial(ContextHead, context=context, **(context_options or {}))
        elif context_options:
            raise ValueError(f"context_options {dict(context_options)} were given without context")
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.backbone = build_backbone(
            backbone,
            in_chans=in_chans,
            output_stride=output_stride,
            freeze_norm=freeze_norm,
            **(backbone_options or {}),
        )
        self.output_stride = self.backbone.output_stride
        build: Callable[..., nn.Module] = HEADS[head] if isinstance(head, str) else head
        self.head = build(self.backbone.num_features, num_classes, **options)
        if backbone_weights is not None:
            load_backbone_weights(self.backbone, backbone_weights)

    def forward_features(self, x: Tensor) -> Tensor:
        """(N, in_chans, H, W) to the backbone's features, (N, C, ⌈H/output_stride⌉, ⌈W/output_stride⌉)."""
        return self.backbone(checked_input(x, self.in_chans))

    def forward_head(self, features: Tensor, size: torch.Size | tuple[int, int]) -> Tensor:
        """Features to scores at the image's ``size``."""
        return resize_scores(self.head(features), size, stride=self.output_stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x), x.shape[-2:])

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """New last convolutions for ``num_classes``; everything before them stays."""
        head: Any = self.head
        head.reset_classifier(num_classes)
        self.num_classes = num_classes

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The scales of the coefficients' norm, and positions: decay would flatten the attention."""
        return {name for name, _ in self.named_parameters() if "attn.norm." in name or "attn.positions." in name}


SEGMENTERS: dict[str, Callable[..., nn.Module]] = {f"deeplabv2_{head}": partial(DeepLabV2, head) for head in HEADS}
