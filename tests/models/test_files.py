"""Networks as files: what goes in comes out, and what does not belong is refused in one line."""

import json
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from kronattn.models import create_model
from kronattn.models.files import Description, load_model, read_weights, save_model
from kronattn.models.weights import unpack

OPTIONS = {"width": 0.25, "num_classes": 3}
DESCRIPTION = Description("kanet_qkv", OPTIONS, ["a", "b", "c"], resize=40, size=32)


@pytest.fixture
def network():
    torch.manual_seed(0)
    return create_model("kanet_qkv", **OPTIONS).eval()


def test_round_trip(tmp_path, network):
    save_model(tmp_path / "net.safetensors", network, DESCRIPTION)
    copy, description = load_model(tmp_path / "net.safetensors")
    assert description == DESCRIPTION
    assert not copy.training
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(copy(x), network(x))


def test_half_precision_keeps_vectors(tmp_path, network):
    network.stem.norm.running_var.fill_(1e6)  # past float16's range
    save_model(tmp_path / "net.safetensors", network, DESCRIPTION, half=True)
    state, _ = read_weights(tmp_path / "net.safetensors")
    assert state["stem.conv.weight"].dtype == torch.float16
    assert state["stem.norm.running_var"].dtype == torch.float32
    copy, _ = load_model(tmp_path / "net.safetensors")
    x = torch.randn(2, 3, 32, 32)
    assert copy.stem.conv.weight.dtype == torch.float32
    assert torch.allclose(copy(x), network(x), atol=1e-2)


def test_checkpoint(tmp_path, network):
    state = {"network." + name: tensor for name, tensor in network.state_dict().items()}
    torch.save({"state_dict": state, "kronattn": DESCRIPTION.to_dict()}, tmp_path / "last.ckpt")
    copy, description = load_model(tmp_path / "last.ckpt")
    assert description == DESCRIPTION
    assert torch.equal(copy.classifier.weight, network.classifier.weight)


def test_a_later_versions_field_is_passed_over():
    assert Description.from_dict({**DESCRIPTION.to_dict(), "colour": "red"}) == DESCRIPTION


def test_failed_write_leaves_the_old_file(tmp_path, network, monkeypatch):
    path = tmp_path / "net.safetensors"
    path.write_text("old")

    def full(*args, **options):
        raise OSError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space"):
        save_model(path, network, DESCRIPTION)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_pickled_code_is_refused(tmp_path, capsys):
    for name, save in (("a.ckpt", lambda p: torch.save({"x": Evil()}, p)), ("b.ckpt", _pickle)):
        save(tmp_path / name)
        with pytest.raises(ValueError, match="so it is not loaded") as caught:
            unpack(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert "executed" not in capsys.readouterr().out


def _pickle(path):
    path.write_bytes(pickle.dumps({"x": Evil()}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("net.safetensors", b"nonsense", "net.safetensors is not a safetensors file"),
        ("net.ckpt", b"nonsense", "net.ckpt is (not a PyTorch file|no checkpoint)"),
        ("net.ckpt", b"", "net.ckpt is not a PyTorch file"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / name)


def test_weights_of_something_else(tmp_path, network):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="does not say which network it belongs to"):
        load_model(tmp_path / "other.safetensors")
    wrong = Description("kanet_kv", {"width": 0.5, "num_classes": 3}, ["a", "b", "c"])
    save_model(tmp_path / "wrong.safetensors", network, wrong)
    with pytest.raises(ValueError, match="the weights do not fit KANet"):
        load_model(tmp_path / "wrong.safetensors")
    save_file({}, tmp_path / "new.safetensors", metadata={"kronattn": json.dumps({"model": "kanet_9"})})
    with pytest.raises(ValueError, match="'kanet_9', which this version does not know"):
        load_model(tmp_path / "new.safetensors")


@pytest.mark.parametrize("name", ["kanet_kw", "folder/net"])
def test_neither_file_nor_network(name):
    with pytest.raises(FileNotFoundError, match="neither a file nor a network"):
        load_model(name)


def test_a_folder(tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder"):
        load_model(tmp_path)


def test_timms_networks(tmp_path):
    timm = pytest.importorskip("timm")
    network = timm.create_model("resnet18", num_classes=2).eval()
    save_model(tmp_path / "r.safetensors", network, Description("timm/resnet18", {"num_classes": 2}, ["a", "b"]))
    copy, _ = load_model(tmp_path / "r.safetensors")
    assert isinstance(copy, nn.Module)
    assert torch.equal(copy.fc.weight, network.fc.weight)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("model", 7, "the description's model must be a name, not 7"),
        ("options", ["width"], "the description's options must be options by name"),
        ("classes", "ab", "the description's classes must be a list of names"),
        ("std", [1, 0, 1], "the description's std must be positive numbers, one for each channel"),
        ("mean", [0.5, float("nan"), 0.5], "the description's mean must be numbers, one for each channel"),
        ("std", [], "the description's std must be positive numbers, one for each channel"),
        ("mean", [0.5], "the description's mean and std must have a number for each channel, both"),
        ("size", 0, "the description's size must be a number of pixels, not 0"),
        ("size", 10**9, "the description's size must be a number of pixels"),
        ("task", ["dance"], "the description's task must be a name"),
        ("shape", [1, 0], "the description's shape must be a list of sizes"),
        ("fold", "a", "the description's fold must be a number or nothing"),
        ("palette", [[0, 0, 300]], "the description's palette must be a list of colours"),
        ("options", {"width": "wide"}, "describes a network that cannot be built: kanet_qkv"),
        ("model", "timm/hf-hub:someone/something", "which this version does not know"),
    ],
)
def test_a_description_that_is_none(tmp_path, network, entry, value, message):
    """Found by the soak: files come from anywhere, and their descriptions with them."""
    path = tmp_path / "net.safetensors"
    described = json.dumps({**DESCRIPTION.to_dict(), entry: value})
    save_file(network.state_dict(), path, metadata={"kronattn": described})
    with pytest.raises(ValueError, match=message) as raised:
        load_model(path)
    assert str(path) in str(raised.value)


def test_descriptions_that_are_no_dictionaries(tmp_path, network):
    path = tmp_path / "net.safetensors"
    for text in ("7", "[]", "{}", "{", "[" * 100_000):
        save_file(network.state_dict(), path, metadata={"kronattn": text})
        with pytest.raises(ValueError, match="net.safetensors"):
            load_model(path)


def test_a_file_has_nothing_read_from_elsewhere(tmp_path, network):
    """Its options may name other files, as a recipe's do; the weights are those of the file itself."""
    path = tmp_path / "net.safetensors"
    options = {**OPTIONS, "pretrained": True, "checkpoint_path": "/etc/passwd", "backbone_weights": "/etc/passwd"}
    save_model(path, network, replace(DESCRIPTION, options=options))
    found, _ = load_model(path)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(found(x), network(x))


@pytest.mark.parametrize("state", [{"state_dict": 7}, {"state_dict": {"a": 7}}, {"a": [1]}, {7: torch.zeros(1)}])
def test_checkpoints_without_tensors(tmp_path, state):
    torch.save({"kronattn": DESCRIPTION.to_dict(), **state}, tmp_path / "net.ckpt")
    with pytest.raises(ValueError, match="net.ckpt|do not fit"):
        load_model(tmp_path / "net.ckpt")
