from torch import Tensor, nn

from kronattn.nn import KroneckerAttention


class UNetBlock(nn.Module):
    """A U-Net's two convolutions, after which every row and every column hears from all the others."""

    def __init__(self, in_channels: int, out_channels: int, attention: bool = True) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )
        self.attention = KroneckerAttention(out_channels, mode="qkv", layer_scale=0.0) if attention else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.convs(x)
        return y if self.attention is None else self.attention(y, residual=y)
