"""nnU-Net: Kronecker attention in the encoder of the network that it builds. Nothing of nnU-Net is imported here."""

from __future__ import annotations

from typing import Any

from torch import nn

from kronattn.integrations.monai import KroneckerAttentionBlock

__all__ = ["with_context"]


def with_context(network: Any, stages: int = 2) -> nn.Module:
    """Put Kronecker attention after the last stages of an nnU-Net's encoder, in 2 or 3 dimensions.

    Args:
        network: a U-Net of ``dynamic_network_architectures``, plain or residual, as nnU-Net builds it. It is changed.
        stages: how many of the encoder's last stages.

    Returns:
        The network.
    """
    encoder: Any = getattr(network, "encoder", None)
    if not isinstance(getattr(encoder, "stages", None), nn.Module):
        raise TypeError(f"expected an nnU-Net, whose encoder has stages, not a {type(network).__name__}")
    if isinstance(stages, bool) or not isinstance(stages, int) or not 0 <= stages <= len(encoder.stages):
        raise ValueError(f"stages must be from 0 to {len(encoder.stages)}, which the encoder has, not {stages!r}")
    dims = 3 if encoder.conv_op is nn.Conv3d else 2
    for at in range(len(encoder.stages) - stages, len(encoder.stages)):
        channels = encoder.output_channels[at]
        groups = next(count for count in (32, 16, 8, 4, 2, 1) if channels % count == 0)
        block = KroneckerAttentionBlock(dims, channels, norm_num_groups=groups)
        encoder.stages[at] = nn.Sequential(encoder.stages[at], block)
    return network
