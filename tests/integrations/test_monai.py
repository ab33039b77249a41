"""Our block inside MONAI: its arguments, a bundle's configuration, 2-D and 3-D."""

import inspect
import sys

import pytest
import torch

from kronattn.integrations.monai import KroneckerAttentionBlock
from tests.integrations.examples import example
from tests.integrations.steps import exports, saves_and_loads, step


@pytest.mark.parametrize("grid", [(9,), (6, 7), (3, 5, 4)])
@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_without_monai(grid, mode):
    block = KroneckerAttentionBlock(len(grid), 32, num_head_channels=8, mode=mode)
    x = torch.randn(2, 32, *grid)
    assert block(x).shape == x.shape
    exports(block, x)


def test_dtype_of_the_attention():
    block = KroneckerAttentionBlock(2, 32, attention_dtype=torch.bfloat16)
    assert block(torch.randn(1, 32, 5, 6)).dtype == torch.float32


@pytest.mark.parametrize("attention_dtype", [torch.float32, torch.float64])
def test_dtypes_that_autocast_does_not_take(attention_dtype):
    block = KroneckerAttentionBlock(2, 32, attention_dtype=attention_dtype).bfloat16()
    assert block(torch.randn(1, 32, 5, 6).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spatial_dims": 4, "num_channels": 32}, "spatial_dims must be 1, 2 or 3, not 4"),
        ({"spatial_dims": 2, "num_channels": 32, "num_head_channels": 7}, "num_channels 32 must be a multiple of"),
        ({"spatial_dims": 2, "num_channels": 30}, "num_channels 30 must be a multiple of norm_num_groups 32"),
        ({"spatial_dims": 2, "num_channels": 32, "num_head_channels": 0}, "num_head_channels must be an int from 1 up"),
        ({"spatial_dims": 2, "num_channels": 0}, "num_channels must be an int from 1 up, not 0"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        KroneckerAttentionBlock(**arguments)


def test_an_input_of_other_dimensions():
    with pytest.raises(ValueError, match="expected 3 spatial dimensions"):
        KroneckerAttentionBlock(3, 32)(torch.randn(1, 32, 5, 6))
    with pytest.raises(ValueError, match=r"expected 32 channels, got an input of \(1, 16, 5, 6\)"):
        KroneckerAttentionBlock(2, 32)(torch.randn(1, 16, 5, 6))


class TestInMonai:
    @pytest.fixture(autouse=True)
    def _monai(self):
        pytest.importorskip("monai", reason="MONAI is not installed: pip install 'kronattn[monai]'")

    def test_the_arguments_of_its_own_block(self):
        from monai.networks.blocks import SpatialAttentionBlock

        theirs = list(inspect.signature(SpatialAttentionBlock).parameters.values())
        ours = list(inspect.signature(KroneckerAttentionBlock).parameters.values())[: len(theirs)]
        assert [(one.name, one.default) for one in ours] == [(one.name, one.default) for one in theirs]

    def test_in_place_of_its_own_in_a_network(self, monkeypatch):
        """MONAI's diffusion U-Net builds its attention by that name."""
        from monai.networks.nets import diffusion_model_unet

        monkeypatch.setattr(diffusion_model_unet, "SpatialAttentionBlock", KroneckerAttentionBlock)
        model = diffusion_model_unet.DiffusionModelUNet(
            spatial_dims=2,
            in_channels=1,
            out_channels=1,
            channels=(32, 32),
            attention_levels=(False, True),
            num_res_blocks=1,
            num_head_channels=8,
        )
        assert any(isinstance(module, KroneckerAttentionBlock) for module in model.modules())
        assert model(torch.randn(1, 1, 16, 16), torch.tensor([3])).shape == (1, 1, 16, 16)

    def test_a_bundle_s_network_trains_saves_loads_and_exports(self, tmp_path):
        network = example("monai_bundle").network
        torch.manual_seed(0)
        model, x = network(), torch.randn(2, 1, 6, 8, 7)
        step(model, x, torch.randint(0, 3, (2, 6, 8, 7)))
        saves_and_loads(model, network(), x, tmp_path)
        exports(model, x)


def test_nothing_of_monai_is_imported():
    assert (
        "monai"
        not in inspect.getsource(sys.modules["kronattn.integrations.monai"]).split('"""', 2)[2].split("class")[0]
    )
