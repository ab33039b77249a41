from monai.bundle import ConfigParser
from torch import nn

CONFIG = {
    "imports": ["$import torch"],
    "first": {
        "_target_": "monai.networks.blocks.Convolution",
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 32,
    },
    "context": {
        "_target_": "kronattn.integrations.monai.KroneckerAttentionBlock",
        "spatial_dims": 3,
        "num_channels": 32,
        "num_head_channels": 8,
    },
    "last": {"_target_": "torch.nn.Conv3d", "in_channels": 32, "out_channels": 3, "kernel_size": 1},
    "network": "$torch.nn.Sequential(@first, @context, @last)",
}


def network() -> nn.Module:
    """A small segmenter of volumes from a bundle's configuration, with our block by its ``_target_``."""
    return ConfigParser(CONFIG).get_parsed_content("network")
