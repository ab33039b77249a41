"""What people do to a network with other packages' tools, in our networks and heads: adapters, quantisation, counting.

PyTorch's own tools, and stand-ins for these, are in tests/models/test_tools.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kronattn
from kronattn.nn.coefficient_norm import CoefficientNorm

HEAD = "deeplabv2_kao_kv"
MODELS = ["kanet_kv", "kanet_qkv", "attnnet", HEAD]


def build(name):
    torch.manual_seed(0)
    options = {"backbone": "kanet_kv", "backbone_options": {"width": 0.25}} if name == HEAD else {"width": 0.25}
    return kronattn.create_model(name, num_classes=3, **options)


def image():
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def count(modules):
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def relative(found, expected):
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_lora_learns_and_merges(name, training):
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-integrations")
    model = build(name)
    # A low rank does not go with groups of one channel: depth-wise convolutions have no adapters.
    targets = [
        key
        for key, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    ]
    assert any("value_map" in key for key in targets)
    # Adapters that start at zero change nothing, and would agree with anything.
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).train(training)
    adapted(image()).square().sum().backward()
    adapters = {key: parameter for key, parameter in adapted.named_parameters() if "lora_" in key}
    assert len(adapters) == 2 * len(targets)
    for key, parameter in adapters.items():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key
    adapted.eval()
    with torch.no_grad():
        unmerged = adapted(image())
        with adapted.disable_adapter():
            assert relative(adapted(image()), unmerged) > 1e-3
        adapted.merge_adapter()
        assert relative(adapted(image()), unmerged) < 1e-5
        adapted.unmerge_adapter()
        assert relative(adapted(image()), unmerged) < 1e-5
        assert relative(adapted.merge_and_unload()(image()), unmerged) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_eight_bits_by_torchao(name):
    reason = "torchao is not installed: make test-integrations"
    quantization = pytest.importorskip("torchao.quantization", reason=reason)
    model = build(name)
    for module in model.modules():
        if hasattr(module, "running_mean"):
            module.momentum = 1.0
    with torch.no_grad():
        model.train()(image())  # statistics of the image, so that features have a size of about one
        expected = model.eval()(image())
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        found = model(image())
    weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert weights
    assert all(isinstance(weight, quantization.Int8Tensor) for weight in weights)
    # Eight bits of a weight are a relative error of up to 1/254, in each of some ten maps one after another.
    assert 0 < relative(found, expected) < 0.05


@pytest.mark.parametrize("name", MODELS)
def test_thop_counts_every_parameter(name):
    thop = pytest.importorskip("thop", reason="thop is not installed: make test-integrations")
    model = build(name).eval()
    norms = [module for module in model.modules() if isinstance(module, CoefficientNorm)]
    total = count([model])
    assert count(norms) == len(norms) > 0
    macs, parameters = thop.profile(model, inputs=(image(),), verbose=False)
    # Neither has a rule for our norm of the coefficients, one number a head. ultralytics' thop counts the parameters of
    # what it has no rule for; the original, which goes by the same name, leaves them out and counts everything else.
    assert parameters in (total, total - count(norms))
    # Given a rule, both find these too: the norm is called.
    rules = {CoefficientNorm: lambda *_: None}
    macs_with_rule, parameters = thop.profile(build(name).eval(), inputs=(image(),), custom_ops=rules, verbose=False)
    assert parameters == total
    assert macs_with_rule == macs > 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_torchinfo_counts_every_parameter(name, mode):
    torchinfo = pytest.importorskip("torchinfo", reason="torchinfo is not installed: make test-integrations")
    model = build(name)
    summary = torchinfo.summary(model, input_data=image(), mode=mode, verbose=0)
    assert summary.total_params == summary.trainable_params == count([model])
    # A layer that is not called is in no row.
    rows = {id(row.module) for row in summary.summary_list}
    assert [key for key, module in model.named_modules() if id(module) not in rows] == []
