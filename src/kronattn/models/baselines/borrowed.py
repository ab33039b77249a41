"""The baselines that torchvision and timm already have, built without weights.

The libraries are extras: each is imported when one of its networks is built.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from kronattn.extras import require_library


def from_torchvision(name: str, **options: Any) -> Callable[..., nn.Module]:
    """Return what builds torchvision's network of that name: (N, in_chans, h, w) to (N, num_classes).

    >>> from_torchvision("squeezenet1_0")(num_classes=10).num_classes
    10
    """

    def build(num_classes: int = 1000, in_chans: int = 3) -> nn.Module:
        models = require_library("torchvision", name).models
        return with_channels(models.get_model(name, weights=None, num_classes=num_classes, **options), in_chans)

    return build


def from_timm(name: str) -> Callable[..., nn.Module]:
    """Return what builds timm's network of that name: (N, in_chans, h, w) to (N, num_classes).

    >>> from_timm("mobilenetv1_100")(num_classes=10, in_chans=1).num_classes
    10
    """

    def build(num_classes: int = 1000, in_chans: int = 3) -> nn.Module:
        timm = require_library("timm", name)
        return timm.create_model(name, num_classes=num_classes, in_chans=in_chans)

    return build


def with_channels(model: nn.Module, in_chans: int) -> nn.Module:
    """Widen or narrow the first convolution where images do not have torchvision's three channels."""
    if in_chans != 3:
        conv = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
        conv.in_channels = in_chans
        conv.weight = nn.Parameter(conv.weight.new_empty(conv.out_channels, in_chans, *conv.kernel_size))
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return model
