"""What segmentation stands on: classification networks without their classifiers, at a small output stride.

Strides beyond the wanted one become dilation, with the same weights: at the positions that the network had before, it
computes what it computed before (attention inside the backbone aside, which sees the finer grid).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from kronattn.extras import require_library
from kronattn.models.baselines.borrowed import with_channels
from kronattn.models.kanet import OUTPUT_STRIDES, VARIANTS, KANet
from kronattn.names import near_names
from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.ops.compat import is_batch_norm

__all__ = ["BACKBONES", "Backbone", "build_backbone"]

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
BACKBONES = (*RESNETS, *VARIANTS)


def build_backbone(
    name: str, *, in_chans: int = 3, output_stride: int = 8, freeze_norm: bool = False, **options: Any
) -> Backbone:
    """Build a backbone by its name.

    Args:
        name: a ResNet of torchvision's, or a network of Table 1's family.
        in_chans: channels of the image.
        output_stride: of the features at most: 8, 16 or 32.
        freeze_norm: keep every batch norm's statistics and parameters as they are, in training too.
        options: the network's own, such as ``width`` of a KANet.

    Example:
        >>> backbone = build_backbone("kanet_kv", output_stride=16, width=0.25)
        >>> backbone(torch.randn(1, 3, 65, 97)).shape, backbone.num_features, backbone.output_stride
        (torch.Size([1, 80, 5, 7]), 80, 16)
    """
    if output_stride not in OUTPUT_STRIDES:
        raise ValueError(f"output_stride must be 8, 16 or 32, not {output_stride!r}")
    if name in RESNETS:
        return _ResNetBackbone(name, in_chans, output_stride, freeze_norm, options)
    if name in VARIANTS:
        return _KANetBackbone(name, in_chans, output_stride, freeze_norm, options)
    raise ValueError(f"unknown backbone {name!r}: {near_names(str(name), BACKBONES)}")


class Backbone(nn.Module):
    """(N, in_chans, H, W) to (N, num_features, ⌈H/output_stride⌉, ⌈W/output_stride⌉), for any H and W.

    ``left_out`` are the first names of what a classification network has beyond this.
    """

    left_out: tuple[str, ...] = ()

    def __init__(self, in_chans: int, num_features: int, output_stride: int, freeze_norm: bool) -> None:
        super().__init__()
        self.in_chans = in_chans
        self.num_features = num_features
        self.output_stride = output_stride
        self.freeze_norm = freeze_norm

    def _norms(self) -> list[nn.Module]:
        # Those of attention coefficients too; and batch norms that were since made to share their statistics.
        return [module for module in self.modules() if is_batch_norm(module) or isinstance(module, CoefficientNorm)]

    def _freeze(self) -> None:
        """To be called once everything is built."""
        if self.freeze_norm:
            for norm in self._norms():
                norm.requires_grad_(False)
            self.train(self.training)

    def train(self, mode: bool = True) -> Backbone:
        """Switch to training or evaluation; frozen norms stay in evaluation."""
        super().train(mode)
        if self.freeze_norm:
            for norm in self._norms():
                norm.eval()
        return self


class _ResNetBackbone(Backbone):
    """torchvision's ResNet up to its last block, under torchvision's names."""

    left_out = ("fc",)

    def __init__(
        self, name: str, in_chans: int, output_stride: int, freeze_norm: bool, options: dict[str, Any]
    ) -> None:
        models = require_library("torchvision", f"the backbone {name}").models
        resnet: Any = with_channels(models.get_model(name, weights=None, **options), in_chans)
        super().__init__(in_chans, resnet.fc.in_features, output_stride, freeze_norm)
        self.conv1, self.bn1, self.relu, self.maxpool = resnet.conv1, resnet.bn1, resnet.relu, resnet.maxpool
        self.layer1, self.layer2, self.layer3, self.layer4 = resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4
        stride, dilation = 8, 1
        for layer in (resnet.layer3, resnet.layer4):
            if stride == output_stride:
                _dilate(layer, dilation, 2 * dilation)
                dilation *= 2
            else:
                stride *= 2
        self._freeze()

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


def _dilate(layer: nn.Module, before: int, after: int) -> None:
    """Take the stride of a ResNet's layer away: its first convolution sees the grid as it was, all others a finer one.

    torchvision's own ``replace_stride_with_dilation`` does this for the deeper networks alone.
    """
    for conv in layer.modules():
        if isinstance(conv, nn.Conv2d):
            rate = before if conv.stride != (1, 1) else after
            conv.stride = (1, 1)
            if conv.kernel_size != (1, 1):
                conv.dilation = conv.padding = (rate, rate)


class _KANetBackbone(Backbone):
    """A network of Table 1's family up to its last module, under its own names."""

    left_out = ("head", "classifier")

    def __init__(
        self, name: str, in_chans: int, output_stride: int, freeze_norm: bool, options: dict[str, Any]
    ) -> None:
        kanet = KANet(name, num_classes=0, in_chans=in_chans, output_stride=output_stride, **options)
        last = kanet.feature_info[-1]
        super().__init__(in_chans, last["num_chs"], last["reduction"], freeze_norm)
        self.stem, self.stages = kanet.stem, kanet.stages
        self._freeze()

    def forward(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x))
