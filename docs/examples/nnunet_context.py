from torch import nn

from kronattn.integrations.monai import KroneckerAttentionBlock


def with_context(network: nn.Module, stages: int = 2) -> nn.Module:
    """Put Kronecker attention after the last stages of an nnU-Net's encoder, in 2 or 3 dimensions."""
    encoder = network.encoder
    dims = 3 if encoder.conv_op is nn.Conv3d else 2
    for at in range(len(encoder.stages) - stages, len(encoder.stages)):
        channels = encoder.output_channels[at]
        block = KroneckerAttentionBlock(dims, channels, norm_num_groups=16)
        encoder.stages[at] = nn.Sequential(encoder.stages[at], block)
    return network
