"""The attention modules: maps, norm, heads and grids around the operators."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kronattn import attention, kronecker_attention
from kronattn.nn import DenseAttention, KroneckerAttention
from tests.ops.cases import lay_out

PROJECTS = ["", "v", "q", "k", "qk", "qkv"]


def mapped(linear, x):
    return x if linear is None else torch.einsum("oc,nc...->no...", linear.weight, x)


@pytest.mark.parametrize("project", PROJECTS)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("mode", ["kv", "qkv", "dense"])
def test_maps_before_averaging_give_the_same(project, heads, layout, mode):
    """The module maps averages (and in mode kv keys for queries); the equations map all positions first."""
    options = {"num_heads": heads, "project": project, "coefficient_norm": None, "scale": 0.7}
    layer = (DenseAttention(8, **options) if mode == "dense" else KroneckerAttention(8, mode, **options)).double()
    query, key, value = (lay_out(torch.randn(2, 8, *g, dtype=torch.float64), layout) for g in [(5, 6), (4, 3), (4, 3)])
    for inputs in ((query,), (query, key), (query, key, value)):
        q, k, v = (inputs[0], inputs[-1] if len(inputs) < 3 else inputs[1], inputs[-1])
        q, k, v = mapped(layer.query_map, q), mapped(layer.key_map, k), mapped(layer.value_map, v)
        operator = attention if mode == "dense" else partial(kronecker_attention, mode=mode, mean="once")
        expected = operator(q, k, v, num_heads=heads, scale=0.7, backend="reference")
        torch.testing.assert_close(layer(*inputs), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(layer.eval()(*inputs), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("kind", ["kv", "qkv", "dense", "pooled"])
def test_norm_inside_the_module(kind, per_key):
    """Training and evaluation against nn.BatchNorm1d on coefficients built from the reference's averages."""
    from kronattn.ops import reference

    torch.manual_seed(0)
    norm = {"coefficient_norm": "batch_per_key" if per_key else "batch", "grid": (5, 6) if per_key else None}
    if kind in ("kv", "qkv"):
        layer = KroneckerAttention(4, kind, mean="each", **norm).double()
    else:
        layer = DenseAttention(4, pool=2 if kind == "pooled" else None, **norm).double()
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64)
    if kind in ("kv", "qkv"):
        keys = reference.axis_averages(x)
    elif kind == "pooled":
        keys = nn.functional.max_pool2d(x, 2, ceil_mode=True).flatten(2)
    else:
        keys = x.flatten(2)
    queries = keys if kind == "qkv" else x.flatten(2)
    values = layer.value_map.weight @ keys
    bn = nn.BatchNorm1d(keys.shape[-1] if per_key else 1).double()
    for training in (True, True, False):
        layer.train(training), bn.train(training)
        matrix = keys.transpose(1, 2) @ queries
        normed = bn(matrix if per_key else matrix.flatten(1)[:, None]).view(matrix.shape)
        output = values @ normed.softmax(dim=1)
        expected = reference.outer_sum(output, (5, 6)) if kind == "qkv" else output.view(x.shape)
        torch.testing.assert_close(layer(x), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layer", [KroneckerAttention, partial(KroneckerAttention, mode="qkv"), DenseAttention])
class TestAny:
    def test_any_size_at_inference(self, layer):
        layer = layer(6)
        layer(torch.randn(2, 6, 8, 8))
        layer.eval()
        for grid in [(8, 8), (3, 17), (1, 1), (5,), (2, 3, 4), (2, 2, 2, 3)]:
            assert layer(torch.randn(1, 6, *grid)).shape == (1, 6, *grid)

    def test_autocast(self, layer):
        layer = layer(6)
        x = torch.randn(2, 6, 5, 7, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x)
        assert y.dtype == torch.bfloat16
        exact = copy.deepcopy(layer)(x)
        torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)
        y.float().sum().backward()
        assert x.grad.dtype == torch.float32
        assert torch.isfinite(x.grad).all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("project", ["v", "qkv"])
    def test_weights_in_half_precision(self, layer, dtype, project):
        layer = layer(6, project=project)
        x = torch.randn(2, 6, 5, 7).to(dtype)
        layer(torch.randn(2, 6, 5, 7))  # statistics of the coefficients
        half = copy.deepcopy(layer).to(dtype)
        for mode in (False, True):  # training moves the statistics
            y = half.train(mode)(x)
            assert y.dtype == dtype
            exact = copy.deepcopy(layer).train(mode)(x.float())
            torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.05)

    def test_added(self, layer):
        layer = layer(6, num_heads=2).eval()
        for grid in [(5, 7), (4,), (2, 3, 4)]:
            x, skip = torch.randn(2, 6, *grid), torch.randn(2, 6, *grid)
            torch.testing.assert_close(layer(x, residual=skip), layer(x) + skip)

    def test_empty_batch(self, layer):
        layer = layer(6)
        assert layer(torch.randn(0, 6, 5, 7)).shape == (0, 6, 5, 7)
        assert torch.isfinite(layer.norm.running_var).all()

    @pytest.mark.parametrize("training", [True, False])
    def test_compile_without_recompiling(self, layer, training):
        torch._dynamo.reset()
        layer = layer(6).train(training)
        compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, dynamic=True, backend="aot_eager")
        with torch._dynamo.config.patch(error_on_recompile=True):
            for shape in [(2, 6, 5, 8), (3, 6, 7, 9), (4, 6, 11, 4)]:
                x = torch.randn(shape)
                torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-4)

    def test_export_with_dynamic_sizes(self, layer):
        layer = layer(6).eval()
        sizes = {axis: torch.export.Dim(name, min=4, max=64) for axis, name in ((0, "n"), (2, "h"), (3, "w"))}
        program = torch.export.export(layer, (torch.randn(5, 6, 7, 8),), dynamic_shapes=((sizes,)))
        x = torch.randn(4, 6, 9, 11)
        torch.testing.assert_close(program.module()(x), layer(x), rtol=1e-4, atol=1e-5)

    def test_symbolic_trace_and_state(self, layer):
        model = nn.Sequential(nn.Conv2d(3, 6, 1), layer(6)).eval()
        traced = torch.fx.symbolic_trace(model)
        x = torch.randn(2, 3, 5, 7)
        torch.testing.assert_close(traced(x), model(x))
        twin = nn.Sequential(nn.Conv2d(3, 6, 1), layer(6)).eval()
        twin.load_state_dict(model.state_dict())
        torch.testing.assert_close(twin(x), model(x))

    def test_same_seed_same_weights(self, layer):
        states = []
        for _ in range(2):
            torch.manual_seed(3)
            states.append(layer(6).state_dict())
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_other_channels():
    layer = KroneckerAttention(8, project="qkv", qk_channels=4, out_channels=12, num_heads=2)
    assert layer(torch.randn(2, 8, 5, 6)).shape == (2, 12, 5, 6)
    assert "out_channels=12, qk_channels=4" in repr(layer)


def test_in_a_timm_resnet():
    timm = pytest.importorskip("timm", reason="timm is not installed: pip install 'kronattn[timm]'")
    model = timm.create_model("resnet18", num_classes=5, block_args={"attn_layer": KroneckerAttention})
    assert any(isinstance(module, KroneckerAttention) for module in model.modules())
    model(torch.randn(2, 3, 64, 64)).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_by_running_statistics_of_each_key_in_half_precision():
    """The bias is in half precision then, and PyTorch's matrix products add no half precision to float32."""
    layer = KroneckerAttention(8, coefficient_norm="batch_per_key", grid=(5, 6)).eval()
    x = torch.randn(2, 8, 5, 6, generator=torch.Generator().manual_seed(0))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        leaf = x.to(dtype).requires_grad_()
        y = layer.to(dtype)(leaf)
        found.append((y, *torch.autograd.grad(y.square().sum(), [leaf, layer.norm.bias])))
    for half, exact in zip(found[1], found[0], strict=True):
        assert (half - exact).norm() <= 5e-2 * exact.norm()


@pytest.mark.parametrize("norm", ["batch", "batch_per_key", "cosine", "sample"])
def test_layers_are_made_where_they_are_to_be(norm):
    """Also among fake tensors, by which tools find out what fits into memory: those cannot be moved afterwards."""
    options = {"coefficient_norm": norm, "grid": (5, 6), "device": "meta", "dtype": torch.float64}
    layer = KroneckerAttention(8, **options)
    assert {(x.device.type, x.dtype) for x in layer.parameters()} == {("meta", torch.float64)}
    with FakeTensorMode():
        layer = DenseAttention(8, **options | {"device": "cpu"})
        layer(torch.randn(2, 8, 5, 6, dtype=torch.float64)).sum().backward()
        assert layer.value_map.weight.grad.shape == (8, 8)


def test_a_scale_goes_where_its_layer_goes():
    layer = KroneckerAttention(8, num_heads=2, scale=torch.tensor([1.0, 2.0]))
    assert "scale" not in layer.state_dict()
    assert layer.to("meta")(torch.randn(2, 8, 5, 6, device="meta")).shape == (2, 8, 5, 6)
    learned = KroneckerAttention(8, scale=nn.Parameter(torch.ones(1)))
    assert "scale" in dict(learned.named_parameters())


@pytest.mark.parametrize("build", [KroneckerAttention, DenseAttention, partial(DenseAttention, pool=2)])
def test_a_norm_of_each_key_knows_its_grid(build):
    """Not the number of keys alone: of (6, 5), each would have another's norm."""
    layer = build(8, coefficient_norm="batch_per_key", grid=[5, 6]).eval()
    assert layer(torch.randn(2, 8, 5, 6)).shape == (2, 8, 5, 6)
    assert layer(torch.randn(2, 8, 3, 3), torch.randn(2, 8, 5, 6)).shape == (2, 8, 3, 3)
    with pytest.raises(ValueError, match=r"was built for keys of the grid \(5, 6\), but they have \(6, 5\); use coef"):
        layer(torch.randn(2, 8, 6, 5))
