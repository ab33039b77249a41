"""ShuffleNet 1.5× with three groups.

Paper: Zhang, Zhou, Lin and Sun, "ShuffleNet: An Extremely Efficient Convolutional Neural Network for
Mobile Devices", 2017, https://arxiv.org/abs/1707.01083.

At 224×224 and 1000 classes: 3,405,448 parameters without batch norm's and 292,443,552 multiply-adds,
where the paper prints 292m. Two choices that its text leaves open are settled by that figure: the stem
keeps 24 channels (36 would give 299.6m), and the bottleneck of a stride-2 unit is a quarter of the
unit's whole output, not of the part that its convolutions produce (which would give 270.0m).
"""

import torch
from torch import Tensor, nn

from kronattn.models.baselines.layers import conv_norm, initialise

STEM_CHANNELS = 24
GROUPS = 3
STAGES = ((360, 4), (720, 8), (1440, 4))  # (output channels, units); the first unit halves the map


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Interleave the channels of the groups, so that the next group convolution sees all of them.

    Shapes: (N, C, h, w) to the same; C is a multiple of `groups`.

    >>> channel_shuffle(torch.arange(6.0).reshape(1, 6, 1, 1), 3).flatten().tolist()
    [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]
    """
    return x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)


class ShuffleUnit(nn.Module):
    """A residual bottleneck of point-wise group convolutions around a depth-wise one.

    With stride 1 the input is added; with stride 2 its 3×3 average is concatenated, so the
    convolutions produce `out_channels - in_channels`.

    Shapes: (N, in_channels, h, w) to (N, out_channels, ceil(h / stride), ceil(w / stride)).

    >>> ShuffleUnit(24, 360, stride=2, first_groups=1)(torch.zeros(2, 24, 9, 9)).shape
    torch.Size([2, 360, 5, 5])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        stride: int = 1,
        first_groups: int | None = None,
    ) -> None:
        super().__init__()
        if stride == 1 and in_channels != out_channels:
            raise ValueError(f"stride 1 adds its input: {in_channels} channels in, {out_channels} out")
        middle = out_channels // 4
        produced = out_channels if stride == 1 else out_channels - in_channels
        self.reduce = conv_norm(in_channels, middle, 1, groups=first_groups or GROUPS)
        self.depthwise = conv_norm(middle, middle, 3, stride=stride, groups=middle, activate=False)
        self.expand = conv_norm(middle, produced, 1, groups=GROUPS, activate=False)
        self.shortcut = None if stride == 1 else nn.AvgPool2d(3, stride, padding=1)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.expand(self.depthwise(channel_shuffle(self.reduce(x), GROUPS)))
        y = x + y if self.shortcut is None else torch.cat((self.shortcut(x), y), 1)
        return self.activation(y)


class ShuffleNet(nn.Module):
    """ShuffleNet 1.5× (g = 3), an image classifier.

    Shapes: (N, in_chans, h, w) with h and w from 32 up, to (N, num_classes).

    >>> ShuffleNet(num_classes=10)(torch.zeros(2, 3, 32, 47)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 1000, in_chans: int = 3) -> None:
        super().__init__()
        units: list[nn.Module] = []
        channels = STEM_CHANNELS
        for out_channels, count in STAGES:
            for index in range(count):
                # the stem is too narrow to be split into groups
                first_groups = 1 if channels == STEM_CHANNELS else GROUPS
                stride = 2 if index == 0 else 1
                units.append(ShuffleUnit(channels, out_channels, stride=stride, first_groups=first_groups))
                channels = out_channels
        self.stem = nn.Sequential(conv_norm(in_chans, STEM_CHANNELS, 3, stride=2), nn.MaxPool2d(3, 2, 1))
        self.units = nn.Sequential(*units)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.units(self.stem(x))).flatten(1))
