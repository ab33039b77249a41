"""ChannelNet-v1: MobileNetV1 with its 14×14 layers in groups that channel-wise convolutions join.

Paper: Gao, Wang and Ji, "ChannelNets: Compact and Efficient Convolutional Neural Networks via
Channel-Wise Convolutions", NeurIPS 2018, https://arxiv.org/abs/1809.01330.

Each group module stands for two depth-wise separable convolutions; two with and one without a
channel-wise convolution replace MobileNetV1's five layers of 512 channels. As in MobileNetV1, batch norm
and ReLU follow every convolution, except the channel-wise one, whose result goes straight into the sum.

At 224×224 and 1000 classes: 3,690,440 parameters without batch norm's (printed: 3.7m) and 468,488,704
multiply-adds (printed: 407m, see the note in `kronattn.models.baselines.BASELINES`).
"""

from torch import Tensor, nn

from kronattn.models.baselines.layers import conv_norm, initialise

STEM_CHANNELS = 32
GROUPS = 2
CHANNEL_KERNEL = 8
BEFORE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2))  # (output channels, stride)
AFTER = ((1024, 2), (1024, 1))


def separable(in_channels: int, out_channels: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a depth-wise separable convolution, its point-wise part in `groups`.

    Shapes: (N, in_channels, h, w) to (N, out_channels, ceil(h / stride), ceil(w / stride)).

    >>> import torch
    >>> separable(8, 16, stride=2)(torch.zeros(2, 8, 7, 7)).shape
    torch.Size([2, 16, 4, 4])
    """
    return nn.Sequential(
        conv_norm(in_channels, in_channels, 3, stride=stride, groups=in_channels),
        conv_norm(in_channels, out_channels, 1, groups=groups),
    )


class ChannelWiseConv(nn.Module):
    """A convolution that slides along the channels: one kernel for each group, of stride `groups`.

    Every kernel passes over all channels and gives one group of the output, so each output group has
    met every input group. There are `groups * kernel_size` weights, whatever the number of channels.

    Shapes: (N, C, h, w) to the same; C is a multiple of `groups`.

    >>> import torch
    >>> layer = ChannelWiseConv(groups=2, kernel_size=8)
    >>> layer(torch.zeros(2, 12, 5, 7)).shape, layer.conv.weight.numel()
    (torch.Size([2, 12, 5, 7]), 16)
    """

    def __init__(self, groups: int = GROUPS, kernel_size: int = CHANNEL_KERNEL) -> None:
        super().__init__()
        if kernel_size < groups or (kernel_size - groups) % 2:
            raise ValueError(f"kernel_size {kernel_size} must be {groups} (groups) plus an even number")
        padding = ((kernel_size - groups) // 2, 0)
        self.conv = nn.Conv2d(1, groups, (kernel_size, 1), (groups, 1), padding, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # channels become the height of a one-channel image: (N, 1, C, hw) to (N, groups, C / groups, hw)
        return self.conv(x.flatten(2).unsqueeze(1)).reshape(x.shape)


class GroupModule(nn.Module):
    """GM: two depth-wise separable convolutions in groups, added to their input.

    Shapes: (N, channels, h, w) to the same.

    >>> import torch
    >>> GroupModule(16)(torch.zeros(2, 16, 5, 7)).shape
    torch.Size([2, 16, 5, 7])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*(separable(channels, channels, groups=GROUPS) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class GroupChannelWiseModule(GroupModule):
    """GCWM: a group module whose groups a channel-wise convolution joins before the sum.

    Shapes: (N, channels, h, w) to the same.

    >>> import torch
    >>> GroupChannelWiseModule(16)(torch.zeros(2, 16, 5, 7)).shape
    torch.Size([2, 16, 5, 7])
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.body.append(ChannelWiseConv())


class ChannelNet(nn.Module):
    """ChannelNet-v1, an image classifier.

    Shapes: (N, in_chans, h, w) with h and w from 32 up, to (N, num_classes).

    >>> import torch
    >>> ChannelNet(num_classes=10)(torch.zeros(2, 3, 32, 47)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 1000, in_chans: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm(in_chans, STEM_CHANNELS, 3, stride=2)]
        channels = STEM_CHANNELS
        for out_channels, stride in BEFORE:
            layers.append(separable(channels, out_channels, stride=stride))
            channels = out_channels
        layers += [GroupChannelWiseModule(channels), GroupChannelWiseModule(channels), GroupModule(channels)]
        for out_channels, stride in AFTER:
            layers.append(separable(channels, out_channels, stride=stride))
            channels = out_channels
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))
