"""The paper's four modules: what they compute, written out with concatenations, and what they cost."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kronattn.measure.madd import count_madd
from kronattn.nn import (
    AttnModule,
    AttnSkipModule,
    BaseModule,
    BaseSkipModule,
    DenseAttention,
    KroneckerAttention,
    blocks,
)

ATTENTIONS = {
    "kv": KroneckerAttention,
    "qkv": partial(KroneckerAttention, mode="qkv"),
    "dense": DenseAttention,
    "pooled": partial(DenseAttention, pool=2),
}
MODULES = {
    "base": BaseModule,
    "base_skip": BaseSkipModule,
    **{f"attn_{name}": partial(AttnModule, attn_layer=layer) for name, layer in ATTENTIONS.items()},
    **{f"attn_skip_{name}": partial(AttnSkipModule, attn_layer=layer) for name, layer in ATTENTIONS.items()},
}


def build(name, *arguments, seed=0, **options):
    torch.manual_seed(seed)
    module = MODULES[name](*arguments, **options)
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(child.weight, 0.5, 1.5)
            if child.bias is not None:
                nn.init.normal_(child.bias)
            nn.init.normal_(child.running_mean, 0, 0.1)
            nn.init.uniform_(child.running_var, 0.5, 1.5)
    return module


def as_in_the_paper(module, x):
    """Each module's paragraph, with every concatenation made."""
    if isinstance(module, AttnModule):
        attended = module.attn(x)
        if module.stride > 1:
            attended = F.avg_pool2d(attended, module.stride, ceil_mode=True)
        elif isinstance(module, AttnSkipModule):
            attended = attended + x
        paths = [attended] if module.expand is None else [module.depthwise(module.expand(x)), attended]
        y = module.project(torch.cat(paths, dim=1))
    else:
        expanded = x
        if module.expand is not None:
            expanded = module.expand(x)
            if isinstance(module, BaseSkipModule):
                expanded = torch.cat([expanded, x], dim=1)
        y = module.project(module.depthwise(expanded))
    return x + y if module.stride == 1 and module.in_channels == module.out_channels else y


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("channels", "stride", "expansion"), [((8, 8), 1, 6), ((8, 12), 2, 3), ((6, 8), 1, 1), ((8, 8), 1, 2.5)]
)
@pytest.mark.parametrize("name", MODULES)
def test_computes_what_the_paper_says(name, channels, stride, expansion, layout):
    module = build(name, *channels, stride=stride, expansion=expansion).double()
    x = torch.randn(2, channels[0], 7, 9, dtype=torch.float64).to(memory_format=layout)
    twin = build(name, *channels, stride=stride, expansion=expansion).double()
    for training in (True, False):
        module.train(training), twin.train(training)
        expected = as_in_the_paper(twin, x)
        output = module(x)
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
        assert output.shape == (2, channels[1], -(-7 // stride), -(-9 // stride))
        with torch.inference_mode():
            module.eval(), twin.eval()
            fast = module(x)
            torch.testing.assert_close(fast, as_in_the_paper(twin, x), rtol=1e-10, atol=1e-10)
            assert fast.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_reach_every_parameter(name):
    module = build(name, 8, 8)
    x = torch.randn(3, 8, 7, 6, requires_grad=True)
    module(x).square().mean().backward()
    assert x.grad.abs().sum() > 0
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.abs().sum() > 0, key


def test_base_skip_saves_what_it_should():
    """c·c parameters and h·w·c·c multiply-adds (the paper prints h·w·c for the latter)."""
    base, skip = BaseModule(16, 24), BaseSkipModule(16, 24)
    x = torch.empty(1, 16, 10, 12)

    def weights(module):
        return sum(child.weight.numel() for child in module.modules() if isinstance(child, nn.Conv2d))

    assert weights(base) - weights(skip) == 16 * 16
    assert count_madd(base, x) - count_madd(skip, x) == 10 * 12 * 16 * 16


def test_attn_skip_costs_what_attn_does():
    x = torch.empty(1, 16, 10, 12)
    plain, skip = AttnModule(16, 24), AttnSkipModule(16, 24)
    assert count_madd(plain, x) == count_madd(skip, x)
    assert [p.shape for p in plain.parameters()] == [p.shape for p in skip.parameters()]
    # 1×1 and depth-wise convolutions of (r − 1)c channels, the attention, and the last 1×1 of rc.
    positions, new, keys = 120, 80, 22
    attention = positions * keys * 2 * 16 + keys * 16 * 16
    assert count_madd(plain, x) == positions * (16 * new + 9 * new + 96 * 24) + attention


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"act_layer": nn.SiLU}], ids=str)
def test_parts_equal_the_concatenation(options, layout, monkeypatch):
    """Inference on large maps leaves the concatenation out."""
    module = build("base_skip", 8, 8, **options).eval()
    x = torch.randn(2, 8, 9, 7).to(memory_format=layout)
    with torch.inference_mode():
        whole = module(x)
        monkeypatch.setattr(blocks, "_WORTH_PARTS", 1)
        monkeypatch.setattr(torch, "cat", lambda *_, **__: pytest.fail("concatenated"))
        parts = module(x)
    torch.testing.assert_close(parts, whole)
    assert parts.is_contiguous(memory_format=layout)


def test_any_attention_layer():
    """A layer that is not ours and knows nothing of skips."""
    module = AttnSkipModule(8, 8, attn_layer=lambda channels: nn.Conv2d(channels, channels, 3, padding=1))
    x = torch.randn(2, 8, 5, 6)
    module.eval()
    torch.testing.assert_close(module(x), as_in_the_paper(module, x))


def test_any_activation_and_norm():
    module = BaseSkipModule(8, 8, act_layer=nn.SiLU, norm_layer=partial(nn.GroupNorm, 2))
    with torch.no_grad():
        x = torch.randn(1, 8, 5, 5)
        torch.testing.assert_close(module(x), as_in_the_paper(module, x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stride": 0}, "stride must be at least 1, not 0"),
        ({"expansion": 0.5}, "expansion must be at least 1, not 0.5"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        BaseModule(8, 8, **arguments)
    with pytest.raises(ValueError, match="channels must be at least 1, not 0 in and 8 out"):
        AttnModule(0, 8)


@pytest.mark.parametrize("place", ["depthwise", "depthwise.act", "project"])
def test_hooks_see_large_maps_too(place, monkeypatch):
    module, shapes = build("base_skip", 8, 8).eval(), []
    module.get_submodule(place).register_forward_hook(lambda _, inputs, output: shapes.append(output.shape[1]))
    monkeypatch.setattr(blocks, "_WORTH_PARTS", 1)
    with torch.no_grad():
        module(torch.randn(2, 8, 9, 7))
    assert shapes == [8 if place == "project" else 48]
