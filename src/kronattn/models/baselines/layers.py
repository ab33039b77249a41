"""The two pieces that ShuffleNet and ChannelNet share: a normalised convolution and its initialisation."""

from torch import nn


def conv_norm(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    stride: int = 1,
    groups: int = 1,
    activate: bool = True,
) -> nn.Sequential:
    """Return a convolution without bias, batch norm and, where asked for, ReLU.

    Shapes: (N, in_channels, h, w) to (N, out_channels, ceil(h / stride), ceil(w / stride)).

    >>> import torch
    >>> conv_norm(8, 16, 3, stride=2)(torch.zeros(2, 8, 7, 7)).shape
    torch.Size([2, 16, 4, 4])
    """
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, stride, kernel_size // 2, groups=groups, bias=False)
    layers: list[nn.Module] = [conv, nn.BatchNorm2d(out_channels)]
    if activate:
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


def initialise(model: nn.Module) -> None:
    """Give every convolution He's initialisation and every linear layer Xavier's, in place.

    >>> layer = nn.Linear(4, 2)
    >>> initialise(layer)
    >>> layer.bias.tolist()
    [0.0, 0.0]
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            # fan-in, since fan-out as PyTorch computes it ignores groups and would shrink
            # depth-wise kernels by the number of channels
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
