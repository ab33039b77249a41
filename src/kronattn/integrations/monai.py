"""MONAI: Kronecker attention with the arguments of its ``SpatialAttentionBlock``, in 1, 2 and 3 dimensions.

In a bundle's configuration: ``{"_target_": "kronattn.integrations.monai.KroneckerAttentionBlock", ...}``. Nothing of
MONAI is needed to build it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kronattn.nn import KroneckerAttention

__all__ = ["KroneckerAttentionBlock"]

_CONVOLUTIONS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class KroneckerAttentionBlock(nn.Module):
    """Group norm, Kronecker attention with maps of q, k and v, a linear map, and the input added.

    Args:
        spatial_dims: 1, 2 or 3.
        num_channels: of the input; a multiple of ``norm_num_groups`` and of ``num_head_channels``.
        num_head_channels: channels of a head; one head by default.
        norm_num_groups, norm_eps: of the group norm.
        include_fc: whether a linear map follows the attention.
        attention_dtype, use_combined_linear, use_flash_attention: taken and without effect: attention is added up in
            float32 at least, and there is no matrix of all positions to avoid.
        mode: "qkv" (rows and columns ask) or "kv" (every position asks).

    Shape:
        (N, num_channels, *grid) to the same.

    Example:
        >>> KroneckerAttentionBlock(3, 32, num_head_channels=8)(torch.randn(1, 32, 4, 6, 5)).shape
        torch.Size([1, 32, 4, 6, 5])
    """

    def __init__(
        self,
        spatial_dims: int,
        num_channels: int,
        num_head_channels: int | None = None,
        norm_num_groups: int = 32,
        norm_eps: float = 1e-6,
        attention_dtype: torch.dtype | None = None,
        include_fc: bool = True,
        use_combined_linear: bool = False,
        use_flash_attention: bool = False,
        mode: str = "qkv",
    ) -> None:
        super().__init__()
        if spatial_dims not in _CONVOLUTIONS:
            raise ValueError(f"spatial_dims must be 1, 2 or 3, not {spatial_dims}")
        head_channels = num_channels if num_head_channels is None else num_head_channels
        parts = {"num_head_channels": head_channels, "norm_num_groups": norm_num_groups}
        for name, value in {"num_channels": num_channels, **parts}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an int from 1 up, not {value!r}")
        for name, value in parts.items():
            if num_channels % value:
                raise ValueError(f"num_channels {num_channels} must be a multiple of {name} {value}")
        self.spatial_dims = spatial_dims
        self.norm = nn.GroupNorm(norm_num_groups, num_channels, eps=norm_eps, affine=True)
        self.attn = KroneckerAttention(
            num_channels,
            mode,
            num_heads=num_channels // head_channels,
            project="qkv",
            coefficient_norm=None,
            scale=head_channels**-0.5,
        )
        self.fc = _CONVOLUTIONS[spatial_dims](num_channels, num_channels, 1) if include_fc else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != self.spatial_dims + 2:
            raise ValueError(f"expected {self.spatial_dims} spatial dimensions, got an input of {tuple(x.shape)}")
        if x.shape[1] != self.norm.num_channels:
            raise ValueError(f"expected {self.norm.num_channels} channels, got an input of {tuple(x.shape)}")
        return x + self.fc(self.attn(self.norm(x)))
