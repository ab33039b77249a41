"""Exported networks: all of them agree with PyTorch at sizes they were not captured at, or nothing is written."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from kronattn.export import LIMIT, SIZES, export_network, find_network
from kronattn.export.capture import _captured
from kronattn.models import create_model, list_models
from kronattn.models.files import Description
from kronattn.models.kanet import VARIANTS, Row
from tests.trained import FEW_ROWS, settled
from tests.trained import small_network as small

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


def exported_or_skipped(model, description, **options):
    try:
        return export_network(model, description, **options)
    except ValueError as error:
        if "cannot be exported" in str(error) and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
            pytest.skip(f"this version of PyTorch: {error}")
        raise


def output_names(content: bytes) -> list[str]:
    import onnx

    return [output.name for output in onnx.load_from_string(content).graph.output]


SEGMENTERS = [name for name in list_models("segmentation") if name.startswith("deeplab")]


def mostly_slow(names, *quick):
    """Each takes seconds: make test has some of them, make test-slow the others."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, "kanet_kv", "kanet_qkv", "attnnet_pool"))
def test_onnx_at_any_size(name):
    import onnx

    exported = exported_or_skipped(small(name), Description(name, {"num_classes": 3}), sizes=[*SIZES, (97, 65)])
    assert len(exported.differences) == 4
    for difference in exported.differences:
        assert difference.absolute <= LIMIT * difference.outputs
        assert difference.outputs > 1e-3  # else agreement would mean nothing
    proto = onnx.load_from_string(exported.content)
    (image,) = proto.graph.input
    shape = [size.dim_param or size.dim_value for size in image.type.tensor_type.shape.dim]
    assert (image.name, shape) == ("image", ["batch", 3, "height", "width"])
    (metadata,) = (entry.value for entry in proto.metadata_props if entry.key == "kronattn")
    assert json.loads(metadata)["model"] == name
    assert output_names(exported.content) == ["logits"]


def test_torch_export():
    exported = exported_or_skipped(small("kanet_qkv"), Description("kanet_qkv"), format="torch-export")
    assert exported.largest.relative <= LIMIT


def test_one_fixed_size():
    exported = export_network(small("attnnet_pool"), Description("attnnet_pool", size=96), dynamic=False)
    assert [one.size for one in exported.differences] == [(96, 96)]


def test_one_fixed_size_that_is_not_square():
    description = Description("mean", {"in_chans": 1}, size=216, task="spectrograms", shape=[1, 64, 216])
    exported = export_network(_Mean(), description, dynamic=False, format="torch-export")
    assert [one.size for one in exported.differences] == [(64, 216)]


def test_a_network_for_volumes_is_refused():
    with pytest.raises(ValueError, match="unet3d is for volumes, not for images: kronattn evaluate takes volumes"):
        export_network(_Mean(), Description("unet3d", task="volumes"), format="torch-export")


def test_a_network_that_differs_is_refused(monkeypatch):
    from kronattn.export import capture

    monkeypatch.setattr(capture, "_torch_export", lambda *_: (b"", lambda images: images.mean(dim=(2, 3)) + 1.001))
    with pytest.raises(ValueError, match="not written: .* differs from PyTorch by 1.0e-03 at .* of that"):
        export_network(_Mean(), Description("mean"), format="torch-export")


def test_a_network_that_cannot_be_captured_is_one_line():
    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ValueError, match="Branches cannot be exported by torch") as caught:
        _captured(Branches(), torch.zeros(1, 3, 4, 4), dynamic=False)
    assert "\n" not in str(caught.value)


def test_networks_by_name_and_file(tmp_path):
    model, description, trained = find_network("kanet_without_kao")
    assert not model.training
    assert description.model == "kanet_without_kao"
    assert isinstance(trained, bool)
    with pytest.raises(FileNotFoundError):
        find_network(str(tmp_path / "none.safetensors"))


@pytest.mark.parametrize("name", list_models("segmentation"))
def test_a_segmenter_by_name_is_one(name):
    _, description, trained = find_network(name)
    assert (description.task, trained) == ("segmentation", False)


@pytest.mark.parametrize("size", [1e-6, 1.0, 6e4])
def test_differences_are_relative_to_the_outputs(size, monkeypatch):
    """Outputs of an untrained segmenter reach 6e4; seven digits of that are more than 1e-4."""
    from kronattn.export import capture

    class Scaled(nn.Module):
        def forward(self, x):
            return size * x.mean(dim=(2, 3)).clamp(1, 1)

    for off, fine in ((2e-6, True), (2e-3, False)):
        monkeypatch.setattr(
            capture, "_torch_export", lambda *_, off=off: (b"", lambda x: torch.full((len(x), 3), size * (1 + off)))
        )
        if fine:
            assert export_network(Scaled(), Description("scaled"), format="torch-export").content == b""
        else:
            with pytest.raises(ValueError, match="not written"):
                export_network(Scaled(), Description("scaled"), format="torch-export")


def test_exported_programs_are_of_the_rewritten_network():
    """Converters know neither our operators nor baddbmm."""
    import io

    exported = exported_or_skipped(small("kanet_kv"), Description("kanet_kv"), format="torch-export")
    program = torch.export.load(io.BytesIO(exported.content))
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not {one for one in operators if "baddbmm" in one or "kronattn" in one}


class _Mean(nn.Module):
    def forward(self, x):
        return x.mean(dim=(2, 3)) + 1


@pytest.mark.parametrize("name", mostly_slow(SEGMENTERS, "deeplabv2_kao_kv", "deeplabv2_kao_qkv"))
def test_segmenters_at_any_size(name):
    table = (*FEW_ROWS, Row(True, 2, 16, 1, 2))
    torch.manual_seed(0)
    options = {"backbone": "kanet_kv", "num_classes": 3, "backbone_options": {"width": 0.25, "table": table}}
    exported = exported_or_skipped(settled(create_model(name, **options)), Description(name, task="segmentation"))
    assert exported.largest.relative <= LIMIT
    assert exported.largest.outputs > 1e-3
    assert output_names(exported.content) == ["scores"]
