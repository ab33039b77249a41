"""The guide's change to an nnU-Net, on the network that nnU-Net builds."""

import pytest
import torch
from torch import nn

from kronattn.integrations.nnunet import with_context
from tests.integrations.steps import step

unet = pytest.importorskip("dynamic_network_architectures.architectures.unet", reason="not installed")


def small_unet(dims: int) -> nn.Module:
    conv, norm = (nn.Conv2d, nn.InstanceNorm2d) if dims == 2 else (nn.Conv3d, nn.InstanceNorm3d)
    torch.manual_seed(0)
    return unet.PlainConvUNet(
        1, 3, (16, 32, 64), conv, 3, (1, 2, 2), 1, 3, 1, norm_op=norm, nonlin=nn.LeakyReLU, conv_bias=True
    )


@pytest.mark.parametrize("dims", [2, 3])
def test_context_in_the_encoder(dims):
    model = with_context(small_unet(dims))
    size = (16,) * dims
    step(model, torch.randn(1, 1, *size), torch.randint(0, 3, (1, *size)))


def test_more_stages_than_there_are():
    with pytest.raises(ValueError, match="stages must be from 0 to 3, which the encoder has, not 4"):
        with_context(small_unet(2), stages=4)


def test_another_network():
    with pytest.raises(TypeError, match="expected an nnU-Net, whose encoder has stages, not a Conv2d"):
        with_context(nn.Conv2d(1, 1, 1))
