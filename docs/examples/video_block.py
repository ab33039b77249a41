from torch import Tensor, nn

from kronattn.nn import KroneckerAttention


class VideoBlock(nn.Module):
    """A residual 3-D convolution; the attention has frames, rows and columns for axes: (N, C, frames, h, w)."""

    def __init__(self, channels: int, attention: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv3d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm3d(channels)
        self.act = nn.ReLU()
        self.attention = KroneckerAttention(channels, mode="qkv", num_heads=4, layer_scale=0.0) if attention else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norm(self.conv(x))) + x
        return y if self.attention is None else self.attention(y, residual=y)
