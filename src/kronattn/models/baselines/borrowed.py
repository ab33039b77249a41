"""The baselines that torchvision and timm already have, built without weights.

The libraries are extras: each is imported when one of its networks is built.
"""

from torch import nn

from kronattn.extras import require_library


def googlenet(num_classes: int = 1000, in_chans: int = 3) -> nn.Module:
    """Return torchvision's GoogLeNet (https://arxiv.org/abs/1409.4842), without auxiliary heads.

    Shapes: (N, in_chans, h, w) to (N, num_classes).

    >>> googlenet(num_classes=10).fc.out_features
    10
    """
    models = require_library("torchvision", "googlenet", extra="vision").models
    # said explicitly, because leaving init_weights out warns that its default will change
    model = models.googlenet(weights=None, num_classes=num_classes, aux_logits=False, init_weights=True)
    return with_channels(model, in_chans)


def vgg16(num_classes: int = 1000, in_chans: int = 3) -> nn.Module:
    """Return torchvision's VGG16 (https://arxiv.org/abs/1409.1556), without batch norm.

    Shapes: (N, in_chans, h, w) to (N, num_classes).

    >>> import torch
    >>> with torch.device("meta"):
    ...     vgg16(num_classes=10).classifier[-1].out_features
    10
    """
    models = require_library("torchvision", "vgg16", extra="vision").models
    return with_channels(models.vgg16(weights=None, num_classes=num_classes), in_chans)


def alexnet(num_classes: int = 1000, in_chans: int = 3) -> nn.Module:
    """Return torchvision's AlexNet, the one-tower version (https://arxiv.org/abs/1404.5997).

    Shapes: (N, in_chans, h, w) to (N, num_classes).

    >>> import torch
    >>> with torch.device("meta"):
    ...     alexnet(num_classes=10).classifier[-1].out_features
    10
    """
    models = require_library("torchvision", "alexnet", extra="vision").models
    return with_channels(models.alexnet(weights=None, num_classes=num_classes), in_chans)


def squeezenet(num_classes: int = 1000, in_chans: int = 3) -> nn.Module:
    """Return torchvision's SqueezeNet 1.0 (https://arxiv.org/abs/1602.07360).

    Shapes: (N, in_chans, h, w) to (N, num_classes).

    >>> squeezenet(num_classes=10).num_classes
    10
    """
    models = require_library("torchvision", "squeezenet", extra="vision").models
    return with_channels(models.squeezenet1_0(weights=None, num_classes=num_classes), in_chans)


def mobilenetv1(num_classes: int = 1000, in_chans: int = 3) -> nn.Module:
    """Return timm's MobileNetV1 at full width (https://arxiv.org/abs/1704.04861).

    Shapes: (N, in_chans, h, w) to (N, num_classes).

    >>> mobilenetv1(num_classes=10, in_chans=1).num_classes
    10
    """
    timm = require_library("timm", "mobilenetv1", extra="timm")
    return timm.create_model("mobilenetv1_100", num_classes=num_classes, in_chans=in_chans)


def with_channels(model: nn.Module, in_chans: int) -> nn.Module:
    """Widen or narrow the first convolution where images do not have torchvision's three channels."""
    if in_chans != 3:
        conv = next(module for module in model.modules() if isinstance(module, nn.Conv2d))
        conv.in_channels = in_chans
        conv.weight = nn.Parameter(conv.weight.new_empty(conv.out_channels, in_chans, *conv.kernel_size))
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return model
