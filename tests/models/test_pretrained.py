"""The weights that come with the package."""

import sys
import tarfile
from pathlib import Path

import pytest
import torch

import kronattn
from kronattn.models.files import load_model, read_weights
from kronattn.models.registry import packaged_names, packaged_weights

VALIDATION = Path("../shared/data/imagenette-144-val.tar")
NAMES = packaged_names()


@pytest.fixture
def images():
    torch.manual_seed(0)
    return torch.randn(2, 3, 96, 96)


@pytest.mark.parametrize("name", NAMES)
class TestFiles:
    def test_small_and_in_half_precision(self, name):
        path = packaged_weights(name)
        assert path.stat().st_size < 8_000_000
        state, _ = read_weights(path)
        matrices = [tensor for tensor in state.values() if tensor.dim() > 1]
        assert {tensor.dtype for tensor in matrices} == {torch.float16}

    def test_card_says_what_it_is_and_names_no_place(self, name):
        card = packaged_weights(name).with_suffix(".md").read_text()
        _, description = load_model(name)
        assert card.startswith(f"# {name} on imagenette")
        assert all(class_name in card for class_name in description.classes)
        for heading in ("validation top-1", "kronattn train --config config.yaml", "seed", "torch"):
            assert heading in card
        assert "path: null" in card
        assert "output: null" in card

    def test_by_name(self, name, images):
        network, description = load_model(name)
        ours = kronattn.create_model(name, pretrained=True)
        assert ours.training
        assert ours.num_classes == len(description.classes) == 10
        assert torch.equal(ours.eval()(images), network(images))

    def test_other_classes_keep_the_features(self, name, images):
        ours = kronattn.create_model(name, pretrained=True, num_classes=3).eval()
        whole = kronattn.create_model(name, pretrained=True).eval()
        assert ours(images).shape == (2, 3)
        assert torch.equal(ours.forward_features(images), whole.forward_features(images))

    def test_options_that_do_not_fit(self, name):
        with pytest.raises(ValueError, match="pretrained=True takes num_classes, .* width would not fit the weights"):
            kronattn.create_model(name, pretrained=True, width=0.5)
        with pytest.raises(ValueError, match="width would not fit the weights"):
            kronattn.create_model(name, pretrained=True, features_only=True, width=0.5)

    @pytest.mark.parametrize("options", [{"in_chans": 0}, {"num_classes": -1}])
    def test_bad_numbers(self, name, options):
        with pytest.raises(ValueError, match="(in_chans|num_classes) must be at least"):
            kronattn.create_model(name, pretrained=True, **options)

    @pytest.mark.parametrize("channels", [1, 4])
    def test_other_channels_as_timm_adapts_them(self, name, channels):
        timm = pytest.importorskip("timm", reason="timm is not installed: pip install 'kronattn[timm]'")
        ours = kronattn.create_model(name, pretrained=True, in_chans=channels, num_classes=10).eval()
        theirs = timm.create_model(name, pretrained=True, in_chans=channels, num_classes=10).eval()
        x = torch.randn(1, channels, 64, 64)
        # timm adds up in half precision, in which the weights are stored.
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-2, atol=1e-2)

    def test_options_that_change_no_weight(self, name, images):
        ours = kronattn.create_model(name, pretrained=True, drop_rate=0.0, drop_path_rate=0.1).eval()
        assert torch.equal(ours(images), kronattn.create_model(name, pretrained=True).eval()(images))

    def test_features_are_asked_for_by_their_tag(self, name, images):
        """As segmentation_models_pytorch asks for ImageNet: these are of Imagenette."""
        timm = pytest.importorskip("timm", reason="timm is not installed: pip install 'kronattn[timm]'")
        with pytest.raises(ValueError, match=f"{name} has no weights of ImageNet; .* {name}.imagenette"):
            timm.create_model(name, pretrained=True, features_only=True)
        tagged = timm.create_model(f"{name}.imagenette", pretrained=True, features_only=True).eval()
        ours = kronattn.create_model(name, pretrained=True).eval()
        torch.testing.assert_close(tagged(images), ours.forward_intermediates(images, intermediates_only=True))

    def test_by_timm(self, name, images):
        timm = pytest.importorskip("timm", reason="timm is not installed: pip install 'kronattn[timm]'")
        ours = kronattn.create_model(name, pretrained=True).eval()
        for named in (name, f"{name}.imagenette"):
            assert torch.equal(timm.create_model(named, pretrained=True).eval()(images), ours(images))
        assert timm.create_model(name).num_classes == 1000
        _, description = load_model(name)
        config = timm.data.resolve_data_config(model=timm.create_model(name, pretrained=True))
        assert config["input_size"] == (3, description.size, description.size)
        assert config["crop_pct"] == description.size / description.resize
        assert timm.create_model(name, pretrained=True, num_classes=3).eval()(images).shape == (2, 3)
        features = kronattn.create_model(name, pretrained=True, features_only=True, scriptable=False).eval()(images)
        torch.testing.assert_close(features, ours.forward_intermediates(images, intermediates_only=True))

    @pytest.mark.skipif(not VALIDATION.exists(), reason="Imagenette is not here")
    def test_right_on_images_it_has_not_seen(self, name, tmp_path):
        """A fortieth of the validation images; their folders are called after WordNet."""
        pytest.importorskip("torchvision")
        from torchvision.datasets import Imagenette

        from kronattn.predict.run import predict_files

        with tarfile.open(VALIDATION) as archive:
            members = [member for member in archive if member.isfile()][::40]
            archive.extractall(tmp_path, members, filter="data")
        paths = [tmp_path / member.name for member in members]
        true = [Imagenette._WNID_TO_CLASS[path.parent.name][0] for path in paths]
        network, description = load_model(name)
        found = [result.classes[0].name for result in predict_files(paths, network, description, top=1)]
        right = sum(one == other for one, other in zip(found, true, strict=True))
        assert right > 0.8 * len(paths)


def test_without_safetensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs safetensors: pip install 'kronattn\[vision\]'"):
        kronattn.create_model("kanet_kv", pretrained=True)
