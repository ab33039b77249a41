"""Heads for segmentation: a backbone's feature map to a score for each class at each pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from kronattn.nn.attention import DenseAttention, KroneckerAttention
from kronattn.nn.plain import is_plain
from kronattn.ops.checks import check_positive_int
from kronattn.ops.fx import is_captured, leaf_function

__all__ = [
    "AtrousPyramidHead",
    "DenseSegmentationHead",
    "KroneckerSegmentationHead",
    "SegmentationHead",
    "class_convolution",
    "classify_by_product",
    "resize_scores",
]

# Of DeepLabV2's last layers, and the standard deviation that these start with.
RATES = (6, 12, 18, 24)
_CLASSIFIER_STD = 0.01


@leaf_function
def resize_scores(scores: Tensor, size: Sequence[int], *, stride: int | None = None) -> Tensor:
    """Bring a map of scores to the size of the image that it was made from, bilinearly.

    Args:
        scores: (N, K, h, w).
        size: (H, W) of the image.
        stride: of the map, where it is known and h = ⌈H/stride⌉, w = ⌈W/stride⌉: position i is then taken to lie on
            pixel i·stride, where convolutions with odd kernels and half their size as padding put it. Without it the
            map is stretched over the image, which is off by up to half a stride, differently at each size.

    Returns:
        (N, K, H, W).

    Example:
        >>> resize_scores(torch.tensor([[[[0.0, 8.0]]]]), (1, 12), stride=8)[0, 0, 0].tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 8.0, 8.0, 8.0]
    """
    height, width = size
    if stride is None:
        return F.interpolate(scores, size=(height, width), mode="bilinear", align_corners=False)
    rows, columns = scores.shape[-2:]
    if not is_captured():
        _check_map_size((rows, columns), (height, width), stride)
    whole = ((rows - 1) * stride + 1, (columns - 1) * stride + 1)
    # A captured graph is made for sizes it has yet to see, so it always takes the longer way, to the same result.
    if not is_captured() and whole == (height, width):
        return F.interpolate(scores, size=whole, mode="bilinear", align_corners=True)
    # Pixels beyond the last position are as good as on it.
    padded = F.pad(scores, (0, 1, 0, 1), mode="replicate")
    resized = F.interpolate(padded, size=(rows * stride + 1, columns * stride + 1), mode="bilinear", align_corners=True)
    return resized[..., :height, :width]


def _check_map_size(given: tuple[int, int], size: tuple[int, int], stride: int) -> None:
    check_positive_int("stride", stride)
    expected = (-(-size[0] // stride), -(-size[1] // stride))
    if given != expected:
        wanted, image, own = ("×".join(map(str, sizes)) for sizes in (expected, size, given))
        raise ValueError(f"scores must be a map of {wanted} for an image of {image} at stride {stride}, not of {own}")


class SegmentationHead(nn.Module):
    """What the heads share: scores from features, brought to the image's size where that is given."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        check_positive_int("in_channels", in_channels)
        check_positive_int("num_classes", num_classes)
        self.in_channels = in_channels
        self.num_classes = num_classes

    def classifiers(self) -> list[nn.Conv2d]:
        """The convolutions that end in classes; what is learnt from scratch wherever the classes are others."""
        raise NotImplementedError

    def reset_classifier(self, num_classes: int) -> None:
        """New last convolutions for ``num_classes``, on the same device; everything before them stays."""
        check_positive_int("num_classes", num_classes)
        weight = self.classifiers()[0].weight
        self.num_classes = num_classes
        self._new_classifiers(device=weight.device, dtype=weight.dtype)

    def _new_classifiers(self, **like: Any) -> None:
        raise NotImplementedError

    def scores(self, features: Tensor) -> Tensor:
        """(N, in_channels, h, w) to (N, num_classes, h, w)."""
        raise NotImplementedError

    def forward(self, features: Tensor, size: Sequence[int] | None = None) -> Tensor:
        scores = self.scores(features)
        return scores if size is None else resize_scores(scores, size)


class AtrousPyramidHead(SegmentationHead):
    """DeepLabV2's atrous spatial pyramid pooling: 3×3 convolutions of several rates, each to the classes, summed.

    Args:
        rates: the dilations, 6, 12, 18 and 24 in DeepLabV2.
        in_channels, num_classes: as in :class:`KroneckerSegmentationHead`, and so is the shape.

    Example:
        >>> AtrousPyramidHead(64, 21)(torch.randn(1, 64, 9, 12), size=(65, 90)).shape
        torch.Size([1, 21, 65, 90])
    """

    def __init__(
        self, in_channels: int, num_classes: int, *, rates: Sequence[int] = RATES, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(in_channels, num_classes)
        if not rates or min(rates) < 1:
            raise ValueError(f"rates must be one or more numbers from 1 up, not {tuple(rates)}")
        self.rates = tuple(rates)
        self._new_classifiers(device=device, dtype=dtype)

    def _new_classifiers(self, **like: Any) -> None:
        channels = self.in_channels, self.num_classes
        self.branches = nn.ModuleList(class_convolution(*channels, 3, rate, **like) for rate in self.rates)

    def classifiers(self) -> list[nn.Conv2d]:
        return [branch for branch in self.branches if isinstance(branch, nn.Conv2d)]

    def scores(self, features: Tensor) -> Tensor:
        first, *others = self.branches
        total = first(features)
        for branch in others:
            total = total + branch(features)
        return total

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.num_classes}, rates={self.rates}"


class _AttentionHead(SegmentationHead):
    """Attention in the place of the pyramid: classes are read off the features and off their global context."""

    attn_layer: ClassVar[type[nn.Module]]

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        *,
        width: int | None = None,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(in_channels, num_classes)
        like: dict[str, Any] = {"device": device, "dtype": dtype}
        if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
            raise ValueError(f"width must be an int from 1 up, or None for a quarter of in_channels, not {width!r}")
        self.width = width = width or max(1, in_channels // 4)
        self.attn = self.attn_layer(
            in_channels, project="qkv", qk_channels=width, out_channels=width, **like, **options
        )
        self._new_classifiers(**like)

    def _new_classifiers(self, **like: Any) -> None:
        self.classifier = class_convolution(self.in_channels, self.num_classes, **like)
        self.context_classifier = class_convolution(self.width, self.num_classes, bias=False, **like)

    def classifiers(self) -> list[nn.Conv2d]:
        return [self.classifier, self.context_classifier]

    def scores(self, features: Tensor) -> Tensor:
        # One 1×1 convolution of both side by side, as a sum of two: nothing is copied to be concatenated.
        return self._classify(features) + self.context_classifier(self.attn(features))

    def _classify(self, features: Any) -> Tensor:
        """The classes of the features by themselves."""
        conv = self.classifier
        if isinstance(features, fx.Proxy) or is_captured() or not features.is_cuda or not is_plain(conv):
            return conv(features)
        channels_last = features.is_contiguous(memory_format=torch.channels_last)
        return classify_by_product(conv, features) if channels_last else conv(features)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.num_classes}, width={self.width}"


class KroneckerSegmentationHead(_AttentionHead):
    """Kronecker attention as the last layer of a segmentation network, for feature maps of any size.

    Q, K and V are linear maps of the features. A 1×1 convolution reads the classes off the features and the
    attention's output side by side, as in the paper's modules: with KAO_QKV alone, whose output is a row's vector plus
    a column's, no classifier could tell a pixel from its neighbours.

    Args:
        in_channels: of the features.
        num_classes: to tell apart.
        mode: "kv" (every position asks) or "qkv" (rows and columns ask).
        width: channels that Q, K and V are mapped to; a quarter of ``in_channels`` by default.
        options: num_heads, which divides the width, and what else :class:`kronattn.nn.KroneckerAttention` takes.

    Shape:
        (N, in_channels, h, w) to (N, num_classes, h, w), or to (N, num_classes, *size) where ``size`` is given.

    Example:
        >>> head = KroneckerSegmentationHead(64, num_classes=21, mode="qkv")
        >>> head(torch.randn(2, 64, 9, 12)).shape
        torch.Size([2, 21, 9, 12])
        >>> head(torch.randn(2, 64, 9, 12), size=(65, 90)).shape
        torch.Size([2, 21, 65, 90])
    """

    attn_layer = KroneckerAttention

    def __init__(
        self, in_channels: int, num_classes: int, mode: str = "kv", *, width: int | None = None, **options: Any
    ) -> None:
        super().__init__(in_channels, num_classes, width=width, mode=mode, **options)

    def scores(self, features: Tensor) -> Tensor:
        attn = self.attn
        assert isinstance(attn, KroneckerAttention)
        if attn.num_heads > 1 or not attn.is_linear_in_values:
            # A classifier of all heads' channels cannot be applied to the values of each, nor to factors of a product.
            return super().scores(features)
        # The classifier is folded into the values, of which there are few: attention then has num_classes channels.
        return attn(features, residual=self._classify(features), map_values=self._classify_values)

    def _classify_values(self, values: Any) -> Tensor:
        """(N, S, width) to (N, S, num_classes)."""
        conv = self.context_classifier
        if not isinstance(values, fx.Proxy) and is_plain(conv):
            return F.linear(values, conv.weight.flatten(1))
        # The tokens as a map one position wide: five operators instead of two, for whoever listens to the module.
        return conv(values.transpose(1, 2).unsqueeze(3)).squeeze(3).transpose(1, 2)


class DenseSegmentationHead(_AttentionHead):
    """The same head with regular attention: every position asks every position.

    Args:
        in_channels, num_classes, width: as in :class:`KroneckerSegmentationHead`, and so is the shape.
        options: of :class:`kronattn.nn.DenseAttention`: pool, the factor that keys and values are pooled by, num_heads
            and others.

    Example:
        >>> DenseSegmentationHead(64, num_classes=21)(torch.randn(2, 64, 9, 12)).shape
        torch.Size([2, 21, 9, 12])
    """

    attn_layer = DenseAttention


def classify_by_product(conv: nn.Conv2d, features: Tensor) -> Tensor:
    """A 1×1 convolution as one matrix product, for features whose channels lie side by side.

    For 21 classes of 513×513 images an NVIDIA H200 takes 167 µs where cuDNN's convolution takes 182, and 392 instead of
    435 forward and backward; its host takes 27 instead of 40.
    """
    return F.linear(features.movedim(1, -1), conv.weight.flatten(1), conv.bias).movedim(-1, 1)


def class_convolution(
    in_channels: int, num_classes: int, kernel_size: int = 1, rate: int = 1, *, bias: bool = True, **like: Any
) -> nn.Conv2d:
    """A convolution to the classes that keeps the map's size, initialised as DeepLab's."""
    conv = nn.Conv2d(
        in_channels, num_classes, kernel_size, padding=rate * (kernel_size // 2), dilation=rate, bias=bias, **like
    )
    nn.init.normal_(conv.weight, std=_CLASSIFIER_STD)
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv
