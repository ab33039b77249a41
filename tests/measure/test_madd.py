"""The counter against closed forms, PyTorch's own counter and fvcore's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import kronattn
from kronattn.measure import count_madd
from kronattn.measure.madd import _copied, _count
from kronattn.nn import DenseAttention, KroneckerAttention


class ConvNet(nn.Module):
    """Strides, groups, dilation, a bias, batch norm and a classifier."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, padding=2, dilation=2, groups=4, bias=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Linear(16, 10)

    def forward(self, x):
        return self.classifier(self.features(x))


def run_for_real(call, *inputs):
    """The count without the shortcut through shapes alone."""
    return _count(_copied(call), inputs, {})


# m·n·2c + n·c², with a linear map on the n values.
@pytest.mark.parametrize(
    ("layer", "keys", "queries"),
    [
        (DenseAttention(8, coefficient_norm=None), 63, 63),
        (DenseAttention(8, pool=2, coefficient_norm=None), 20, 63),
        (KroneckerAttention(8, "kv", coefficient_norm=None), 16, 63),
        (KroneckerAttention(8, "qkv", coefficient_norm=None), 16, 16),
    ],
    ids=["dense", "pooled", "kv", "qkv"],
)
def test_attention_modules_cost_what_the_closed_form_says(layer, keys, queries):
    x = torch.randn(1, 8, 7, 9)
    expected = queries * keys * 16 + keys * 64
    assert count_madd(layer, x) == expected
    assert run_for_real(layer, x) == expected


def test_norm_of_coefficients_costs_nothing_in_evaluation():
    layer, x = KroneckerAttention(8, "kv"), torch.randn(1, 8, 7, 9)
    assert layer.training
    assert count_madd(layer, x) == count_madd(KroneckerAttention(8, "kv", coefficient_norm=None), x)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_agrees_with_plain_flop_counter_where_nothing_is_fused(mode):
    x = torch.randn(2, 8, 5, 6)
    with FlopCounterMode(display=False) as counter:
        kronattn.kronecker_attention(x, mode=mode, backend="reference")
    expected = counter.get_total_flops() // 2
    assert expected > 0
    assert count_madd(kronattn.kronecker_attention, x, mode=mode, backend="reference") == expected
    assert count_madd(kronattn.kronecker_attention, x, mode=mode) == expected


def test_agrees_with_fvcore():
    analysis = pytest.importorskip("fvcore.nn").FlopCountAnalysis
    net, x = ConvNet().eval(), torch.randn(1, 3, 17, 23)
    expected = analysis(net, x).unsupported_ops_warnings(False).by_operator()
    assert count_madd(net, x) == expected["conv"] + expected["linear"]
    assert run_for_real(net, x) == expected["conv"] + expected["linear"]


@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_is_counted(masked):
    query, key, value = torch.randn(2, 3, 10, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)
    mask = torch.zeros(1, 1, 1, 7) if masked else None
    expected = 2 * 3 * 10 * 7 * (8 + 8)
    assert count_madd(F.scaled_dot_product_attention, query, key, value, attn_mask=mask) == expected
    assert run_for_real(lambda *inputs: F.scaled_dot_product_attention(*inputs, attn_mask=mask), query, key, value) == (
        expected
    )


def test_fused_path_of_pytorchs_encoder_is_counted():
    layer, x = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.randn(1, 10, 16)
    expected = 10 * (4 * 16 * 16 + 2 * 16 * 32) + 10 * 10 * (16 + 16)
    assert count_madd(layer, x) == expected
    assert run_for_real(layer, x) == expected
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("count", [count_madd, run_for_real])
def test_products_with_vectors(count):
    matrix, vector = torch.randn(7, 5), torch.randn(5)
    assert count(torch.mv, matrix, vector) == 35
    assert count(torch.dot, vector, vector) == 5
    assert count(torch.addmv, torch.randn(7), matrix, vector) == 35


def test_counts_by_running_where_shapes_are_not_enough():
    seen = []

    def reads_a_value(x):
        seen.append(x.device.type)
        return x @ x if float(x.sum()) >= 0 else x

    assert count_madd(reads_a_value, torch.ones(3, 3)) == 27
    assert seen == ["meta", "cpu"]


def test_closes_over_tensors():
    weight = torch.randn(4, 5)
    assert count_madd(lambda x: x @ weight, torch.randn(3, 4)) == 60


def test_module_stays_as_it_was():
    net = ConvNet().train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    count_madd(net, torch.randn(2, 3, 16, 16))
    assert net.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}


@pytest.mark.parametrize("reads_values", [False, True])
def test_modules_are_counted_as_in_evaluation(reads_values):
    class Net(nn.Linear):
        def forward(self, x):
            if reads_values:
                float(x.sum())
            return super().forward(super().forward(x)) if self.training else super().forward(x)

    assert count_madd(Net(4, 4), torch.ones(1, 4)) == 16


def test_method_of_a_module():
    class Net(ConvNet):
        def forward_features(self, x):
            return self.features(x)

    net, x = Net(), torch.randn(1, 3, 16, 16)
    assert count_madd(net, x) - count_madd(net.forward_features, x) == 160
    assert net.training


def test_shared_parameters_stay_shared():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 4, bias=False)
            self.other = nn.Linear(4, 4, bias=False)
            self.other.weight = self.one.weight

        def forward(self, x):
            assert self.one.weight is self.other.weight
            return self.other(self.one(x))

    assert count_madd(Twice(), torch.randn(1, 4)) == 32


def test_wrong_input_raises_what_the_call_raises():
    with pytest.raises(RuntimeError, match="shapes"):
        count_madd(nn.Linear(10, 20), torch.randn(1, 11))
