"""What the planner picks, and why: asked of tensors that only say that they are on a GPU."""

from __future__ import annotations

import pytest
import torch

import kronattn
from kronattn.models.kanet import KANet
from kronattn.nn import KroneckerAttention, KroneckerSegmentationHead
from kronattn.ops import plan as planner
from kronattn.ops.plan import Plan, explain_plan, make_plan, override_plan


@pytest.fixture
def gpu(monkeypatch):
    """Meta tensors pass for a GPU's, and Triton for working there."""
    monkeypatch.setattr(planner, "has_room", lambda: True)
    monkeypatch.setattr(planner, "broken_reason", lambda: None)
    monkeypatch.setattr(planner, "interpreted", lambda: True)

    class Features(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda")

    def features(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(Features)

    return features


def stages(x, **options):
    plan = make_plan(x, x, x, **options)
    assert plan.reason
    return plan.pool, plan.spread


def test_networks_run_on_the_kernels(gpu):
    """The shapes of the published table of kernels are those of KANet's layers, at 224 px and at larger images."""
    for network in ("kanet_kv", "kanet_qkv"):
        layers = [m for m in KANet(network).modules() if isinstance(m, KroneckerAttention)]
        assert {layer.channels for layer in layers} == {32, 64, 96, 160}
        for layer in layers:
            for size in (7, 14, 28, 56, 128, 512):
                x = gpu(8, layer.channels, size, size)
                assert stages(x, mode=layer.mode) == ("triton", "triton")


def test_heads_multiply_matrices(gpu):
    x = gpu(8, 2048, 65, 65)
    head = KroneckerSegmentationHead(2048, 21, device="meta")
    assert stages(x, mode=head.attn.mode) == ("triton", "matrix_products")
    assert stages(x, mode="qkv") == ("triton", "matrix_products")


@pytest.mark.parametrize(
    ("shape", "options", "expected", "reason"),
    [
        ((2, 64, 14, 14), {"dtype": torch.float32}, ("torch", "torch"), "float32"),
        ((2, 64, 5, 14, 14), {}, ("torch", "torch"), "other than two axes"),
        ((0, 64, 14, 14), {}, ("torch", "torch"), "the batch is empty"),
        ((2, 1024, 14, 14), {"num_heads": 4}, ("triton", "triton"), "256 channels a head"),
        ((2, 1024, 14, 14), {"num_heads": 2}, ("triton", "torch"), "512 channels a head: too many"),
        ((2, 512, 14, 14), {"per_key": True}, ("triton", "torch"), "too many"),
        ((2, 512, 128, 129), {}, ("triton", "torch"), "too many"),
        ((2, 512, 128, 128), {}, ("triton", "matrix_products"), "coefficients smaller than the features"),
    ],
)
def test_reasons(gpu, shape, options, expected, reason):
    x = gpu(*shape, dtype=options.pop("dtype", torch.bfloat16))
    plan = make_plan(x, x, x, **options)
    assert (plan.pool, plan.spread) == expected
    assert reason in plan.reason


def test_maps_to_more_channels_count(gpu):
    layer, x = KroneckerAttention(64, project="qkv", qk_channels=2048, device="meta"), gpu(2, 64, 14, 14)
    assert layer._plan(x, x, x).spread == "matrix_products"
    assert KroneckerAttention(64, out_channels=128, device="meta")._plan(x, x, x).spread == "triton"


def test_too_small_a_gpu(gpu, monkeypatch):
    monkeypatch.setattr(planner, "has_room", lambda: False)
    assert stages(gpu(2, 64, 14, 14)) == ("torch", "torch")


def test_a_broken_triton(gpu, monkeypatch):
    monkeypatch.setattr(planner, "broken_reason", lambda: "Triton does not work here: a test")
    x = gpu(2, 64, 14, 14)
    assert make_plan(x, x, x) == Plan("torch", "torch", "Triton does not work here: a test")


def test_backends_by_name():
    x = torch.randn(1, 4, 3, 3)
    for backend in ("torch", "reference"):
        assert stages(x, backend=backend) == (backend, backend)
    with pytest.raises(
        ValueError, match="backend must be one of 'auto', 'reference', 'torch', 'triton', 'native', not 'cuda'"
    ):
        explain_plan(x, backend="cuda")


def test_users_see_it():
    x = torch.randn(1, 4, 3, 3)
    assert kronattn.explain_plan(x, mode="qkv") == KroneckerAttention(4, "qkv").plan(x)
    assert "query is on cpu" in str(KroneckerAttention(4).plan(x))
    with pytest.raises(ValueError, match="mode must be one of"):
        kronattn.explain_plan(x, mode="q")
    with pytest.raises(ValueError, match="was built for 4 channels, but query has 5"):
        KroneckerAttention(4).plan(torch.randn(1, 5, 3, 3))


def test_overriding_ends():
    x = torch.randn(1, 4, 3, 3)
    with override_plan(spread="matrix_products"):
        with override_plan(pool="triton"):
            assert stages(x) == ("triton", "matrix_products")
        assert stages(x) == ("torch", "matrix_products")
    assert stages(x) == ("torch", "torch")


def test_what_is_planned_is_what_runs(monkeypatch):
    """Each stage is run by the implementation that the plan names, once."""
    from kronattn.ops import matrix_products, torch_backend

    called = []
    for place, function, name in (
        (torch_backend, "spread", "torch"),
        (matrix_products, "softmax", "matrix_products"),
    ):
        real = getattr(place, function)
        monkeypatch.setattr(place, function, lambda *a, real=real, name=name, **k: called.append(name) or real(*a, **k))
    layer, x = KroneckerAttention(4).eval(), torch.randn(2, 4, 3, 3)
    for spread in ("torch", "matrix_products"):
        called.clear()
        with override_plan(spread=spread):
            layer(x)
        assert called == [spread]
