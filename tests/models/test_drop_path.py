"""Stochastic depth in KANet: what is dropped, how often, and that nothing else changes."""

import pytest
import torch

import kronattn
from kronattn.models.drop_path import DropPath
from kronattn.models.kanet import VARIANTS
from tests.trained import network


def branches(model):
    return [module for module in model.modules() if isinstance(module, DropPath)]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_dropped_branch_leaves_the_input(name):
    torch.manual_seed(0)
    whole = kronattn.create_model(name, width=0.25)
    dropping = kronattn.create_model(name, width=0.25, drop_path_rate=0.6)
    dropping.load_state_dict(whole.state_dict())
    # The last module that adds its input: at most 0.6 of the samples go past it.
    (number, place) = max((s, m) for s, stage in enumerate(whole.stages) for m, one in enumerate(stage) if one.skips)
    module, same = dropping.stages[number][place], whole.stages[number][place]
    x = torch.randn(64, module.in_channels, 4, 4)
    y, expected = module(x), same(x)
    dropped = (y == x).flatten(1).all(dim=1)
    assert 5 < int(dropped.sum()) < 59
    kept = 1 - branches(module)[0].rate
    torch.testing.assert_close((y - x)[~dropped] * kept, (expected - x)[~dropped], rtol=1e-4, atol=1e-5)


def test_rates_grow_with_depth():
    model = kronattn.create_model("kanet_kv", width=0.25, drop_path_rate=0.2)
    rates = [branch.rate for branch in branches(model)]
    assert rates == sorted(rates)
    assert 0 <= rates[0] < rates[-1] < 0.2
    assert len(rates) == sum(module.skips for stage in model.stages for module in stage)


def test_off_by_default_and_in_evaluation():
    assert branches(kronattn.create_model("kanet_qkv", width=0.25)) == []
    plain, dropping = network(), network(drop_path_rate=0.5)
    assert list(plain.state_dict()) == list(dropping.state_dict())
    dropping.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(plain(x), dropping(x))


def test_a_rate_that_is_none():
    with pytest.raises(ValueError, match="drop_path_rate must be at least 0 and below 1, not 1.5"):
        kronattn.create_model("kanet_kv", drop_path_rate=1.5)


def test_through_timm():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = timm.create_model("kanet_kv", width=0.25, drop_path_rate=0.1, num_classes=5)
    assert branches(model)
    assert model(torch.randn(2, 3, 64, 64)).shape == (2, 5)
