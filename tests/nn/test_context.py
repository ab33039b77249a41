"""Context layers: each against its paper's equations, written out, and every one by the same list of properties."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from kronattn.nn import (
    AxisMeans,
    CoordinateGate,
    DenseAttention,
    GlobalContext,
    GlobalMean,
    KroneckerAttention,
    SqueezeAxial,
    build_context,
    list_contexts,
)
from kronattn.nn.context_layer import check_context_input
from kronattn.nn.context_registry import context_builder
from tests.versions import skip_tied_export

GRIDS = [(7,), (5, 6), (3, 4, 5), (2, 3, 2, 4)]
# What is written here; attention has tests of its own, and is asked for the interface alone.
LEARNING = ["global_mean", "axis_means", "coordinate_gate", "global_context", "squeeze_axial"]
every_context = pytest.mark.parametrize("name", list_contexts())
learning_context = pytest.mark.parametrize("name", LEARNING)


def built(name, channels=6, axes=2, **options):
    """A layer whose norms have statistics other than 0 and 1, and whose parameters all count."""
    torch.manual_seed(0)
    layer = build_context(name, channels, axes=axes, **options)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if "norm" in key or "positions" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for buffer in layer.buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + 0.5)
    return layer


def grids_of(name):
    # PyTorch's convolutions have up to three axes.
    return [grid for grid in GRIDS if not (name == "squeeze_axial" and len(grid) == 4)]


# The equations, position by position.


def positions(grid):
    return itertools.product(*(range(size) for size in grid))


def average_along(x, axis, index):
    """(N, C): the average over all positions whose index along ``axis`` is this."""
    return x.select(2 + axis, index).flatten(2).mean(2) if x.dim() > 3 else x.select(2, index)


def batch_norm(norm, x):
    """(N, C, *anything), by the batch's statistics or the running ones."""
    shape = (1, -1, *[1] * (x.dim() - 2))
    dims = [d for d in range(x.dim()) if d != 1]
    if norm.training:
        mean, variance = x.mean(dims), x.var(dims, unbiased=False)
    else:
        mean, variance = norm.running_mean, norm.running_var
    x = (x - mean.view(shape)) / (variance.view(shape) + norm.eps).sqrt()
    return x * norm.weight.view(shape) + norm.bias.view(shape)


def global_mean(layer, x):
    total = sum(x[(..., *p)] for p in positions(x.shape[2:]))
    y = (total / math.prod(x.shape[2:])) @ layer.value_map.weight.T
    return torch.stack([y] * math.prod(x.shape[2:]), dim=2).view(x.shape)


def axis_means(layer, x):
    grid = x.shape[2:]
    mean = x.flatten(2).mean(2)
    rows = []
    for p in positions(grid):
        total = sum(average_along(x, axis, index) for axis, index in enumerate(p))
        if layer.mean == "once":
            total = total - (len(grid) - 1) * mean
        rows.append(total @ layer.value_map.weight.T)
    return torch.stack(rows, dim=2).view(x.shape)


def coordinate_gate(layer, x):
    grid = x.shape[2:]
    pooled = {(axis, i): average_along(x, axis, i) for axis, size in enumerate(grid) for i in range(size)}
    shared = torch.stack([z @ layer.reduce.weight.T for z in pooled.values()], dim=2)
    shared = batch_norm(layer.reduce_norm, shared)
    shared = shared * (shared + 3).clamp(0, 6) / 6
    gates = {
        (axis, i): torch.sigmoid(shared[:, :, at] @ layer.gates[axis].weight.T + layer.gates[axis].bias)
        for at, (axis, i) in enumerate(pooled)
    }
    rows = [math.prod((gates[each] for each in enumerate(p)), start=x[(..., *p)]) for p in positions(grid)]
    return torch.stack(rows, dim=2).view(x.shape)


def global_context(layer, x):
    logits = torch.stack([x[(..., *p)] @ layer.key_map.weight[0] for p in positions(x.shape[2:])], dim=1)
    weights = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    context = sum(weights[:, j, None] * x[(..., *p)] for j, p in enumerate(positions(x.shape[2:])))
    hidden = context @ layer.reduce.weight.T + layer.reduce.bias
    centred = hidden - hidden.mean(1, keepdim=True)
    hidden = centred / (centred.square().mean(1, keepdim=True) + layer.reduce_norm.eps).sqrt()
    hidden = (hidden * layer.reduce_norm.weight + layer.reduce_norm.bias).clamp(min=0)
    y = hidden @ layer.expand.weight.T + layer.expand.bias
    return torch.stack([y] * math.prod(x.shape[2:]), dim=2).view(x.shape)


def interpolated(learned, size):
    """(C, places) to ``size`` vectors: place p is the middle of its share of the axis."""
    places = learned.shape[1]
    vectors = []
    for i in range(size):
        at = min(max((i + 0.5) * places / size - 0.5, 0.0), places - 1.0)
        left = int(at)
        right = min(left + 1, places - 1)
        vectors.append((1 - (at - left)) * learned[:, left] + (at - left) * learned[:, right])
    return vectors


def mapped(conv, x):
    """A 1×1 convolution."""
    return torch.einsum("oc,nc...->no...", conv.weight.flatten(1), x)


def depthwise(conv, x):
    grid = x.shape[2:]
    y = torch.zeros_like(x)
    for p in positions(grid):
        total = 0
        for tap in itertools.product(range(3), repeat=len(grid)):
            q = [i + t - 1 for i, t in zip(p, tap, strict=True)]
            if all(0 <= i < size for i, size in zip(q, grid, strict=True)):
                total = total + x[(..., *q)] * conv.weight[(slice(None), 0, *tap)]
        y[(..., *p)] = total
    return y


def squeeze_axial(layer, x):
    grid, d, heads = x.shape[2:], layer.qk_channels, layer.num_heads
    qkv = batch_norm(layer.qkv_norm, mapped(layer.qkv_map, x))
    q, k, v = qkv[:, :d], qkv[:, d : 2 * d], qkv[:, 2 * d :]
    attended = {}
    for axis, size in enumerate(grid):
        r = interpolated(layer.query_positions.weight[axis], size)
        s = interpolated(layer.key_positions.weight[axis], size)
        queries = [average_along(q, axis, i) + r[i] for i in range(size)]
        keys = [average_along(k, axis, i) + s[i] for i in range(size)]
        values = [average_along(v, axis, i) for i in range(size)]
        for i in range(size):
            parts = []
            for head in range(heads):
                of_qk = slice(head * d // heads, (head + 1) * d // heads)
                of_v = slice(head * v.shape[1] // heads, (head + 1) * v.shape[1] // heads)
                logits = [(queries[i][:, of_qk] * key[:, of_qk]).sum(1) / math.sqrt(d / heads) for key in keys]
                weights = torch.stack(logits).softmax(0)
                parts.append(sum(w[:, None] * value[:, of_v] for w, value in zip(weights, values, strict=True)))
            attended[axis, i] = torch.cat(parts, dim=1)
    context = torch.stack([sum(attended[each] for each in enumerate(p)) for p in positions(grid)], dim=2).view(x.shape)
    gate = batch_norm(layer.context_norm, mapped(layer.context_map, context.clamp(min=0)))
    details = batch_norm(layer.depthwise_norm, depthwise(layer.depthwise, qkv)).clamp(min=0)
    details = batch_norm(layer.detail_norm, mapped(layer.detail_map, details))
    return (gate + 3).clamp(0, 6) / 6 * details


ORACLES = {
    "global_mean": global_mean,
    "axis_means": axis_means,
    "coordinate_gate": coordinate_gate,
    "global_context": global_context,
    "squeeze_axial": squeeze_axial,
}


@learning_context
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
def test_equations_and_gradients(name, training, with_residual):
    for grid in grids_of(name):
        layer = built(name, axes=len(grid)).double().train(training)
        x = torch.randn(2, 6, *grid, dtype=torch.float64, requires_grad=True)
        residual = torch.randn_like(x, requires_grad=True) if with_residual else None
        expected = ORACLES[name](layer, x) + (residual if with_residual else 0)
        y = layer(x, residual=residual)
        torch.testing.assert_close(y, expected)
        leaves = [x, *layer.parameters(), *([residual] if with_residual else [])]
        weights = torch.randn_like(y)
        found = torch.autograd.grad((y * weights).sum(), leaves)
        wanted = torch.autograd.grad((expected * weights).sum(), leaves)
        # The sixth in the gradient of PyTorch's h-sigmoid is float32's, and a norm of few values magnifies the error.
        rtol, atol = (1e-5, 1e-7) if name == "squeeze_axial" else (1e-6, 1e-9)
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def test_no_context_is_the_residual_alone():
    x = torch.randn(2, 6, 3, 4)
    layer = build_context("none", 6)
    assert torch.equal(layer(x), torch.zeros_like(x))
    assert torch.equal(layer(x, residual=x), x)


@pytest.mark.parametrize("num_heads", [2, 3])
def test_heads_of_squeeze_axial(num_heads):
    layer = built("squeeze_axial", num_heads=num_heads, qk_channels=12).double()
    x = torch.randn(2, 6, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), squeeze_axial(layer, x))


@pytest.mark.parametrize("grid", GRIDS)
def test_the_mean_for_each_axis(grid):
    layer = AxisMeans(6, mean="each").double()
    x = torch.randn(2, 6, *grid, dtype=torch.float64)
    torch.testing.assert_close(layer(x), axis_means(layer, x))
    constant = torch.full_like(x, 2.0)
    once = AxisMeans(6).double()
    once.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(constant), len(grid) * once(constant))


@learning_context
def test_gradcheck(name):
    layer = built(name, channels=4).double()
    x = torch.randn(2, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def call(x, *values):
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,), {"residual": x})

    assert torch.autograd.gradcheck(call, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("layer", [GlobalMean, AxisMeans])
def test_controls_have_the_parameters_of_a_value_map(layer):
    value_map = KroneckerAttention(24, coefficient_norm=None)
    assert [p.shape for p in layer(24).parameters()] == [p.shape for p in value_map.parameters()]


@pytest.mark.parametrize("name", ["global_mean", "global_context"])
def test_one_vector_for_all_positions(name):
    y = built(name)(torch.randn(2, 6, 3, 4))
    assert torch.equal(y, y[..., :1, :1].expand_as(y))
    y += 1  # memory of its own, not one vector seen many times


# Properties of every layer.


@every_context
class TestEveryContext:
    def test_shapes_and_memory_formats(self, name):
        for grid in [*grids_of(name), (1, 1), (1, 9), (31, 17)]:
            layer = built(name, axes=len(grid)).eval()
            x = torch.randn(2, 6, *grid)
            y = layer(x)
            assert y.shape == x.shape
            assert y.dtype == x.dtype
            if len(grid) in (2, 3):
                last = {2: torch.channels_last, 3: torch.channels_last_3d}[len(grid)]
                for residual in (None, x.to(memory_format=last)):
                    z = layer(x.to(memory_format=last), residual=residual)
                    # PyTorch's own Conv3d does not keep it on a CPU.
                    convolves = name == "squeeze_axial" and len(grid) == 3
                    assert z.is_contiguous(memory_format=last) or 1 in grid or convolves
                    torch.testing.assert_close(z, y if residual is None else y + x, rtol=1e-4, atol=1e-5)

    def test_the_residual_is_added(self, name):
        layer = built(name).eval()
        x, residual = torch.randn(2, 6, 5, 6), torch.randn(2, 6, 5, 6)
        torch.testing.assert_close(layer(x, residual=residual), layer(x) + residual)
        torch.testing.assert_close(layer(x, residual=x), layer(x) + x)

    def test_an_empty_batch(self, name):
        assert built(name).eval()(torch.randn(0, 6, 5, 6)).shape == (0, 6, 5, 6)

    def test_every_parameter_learns_and_belongs_to_a_module_that_is_called(self, name):
        layer = built(name)
        called = set()
        for key, module in layer.named_modules():
            module.register_forward_hook(lambda *_, key=key: called.add(key))
        x = torch.randn(4, 6, 5, 6, requires_grad=True)
        layer(x, residual=x).square().sum().backward()
        for key, parameter in layer.named_parameters():
            assert key.rpartition(".")[0] in called
            assert parameter.grad.abs().sum() > 0, key

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_and_autocast(self, name, dtype):
        layer = built(name).eval()
        x = torch.randn(2, 6, 9, 11)
        expected = layer(x) + x
        with torch.autocast("cpu", dtype=dtype):
            cast = layer(x, residual=x)
        halved = layer.to(dtype)(x.to(dtype), residual=x.to(dtype))
        for found in (cast, halved):
            assert found.dtype == dtype
            torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)

    def test_autocast_trains(self, name):
        layer, x = built(name), torch.randn(2, 6, 5, 6, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(x, residual=x)
        y.float().square().sum().backward()
        assert x.grad.isfinite().all()
        assert all(p.grad.isfinite().all() for p in layer.parameters())

    @pytest.mark.parametrize("axes", [2, 3])
    def test_symbolic_tracing(self, name, axes):
        layer = built(name, axes=axes).eval()
        x = torch.randn(2, 6, *(5, 6, 4)[:axes])
        alone = torch.fx.symbolic_trace(layer)
        torch.testing.assert_close(alone(x), layer(x))
        torch.testing.assert_close(alone(x, residual=x), layer(x, residual=x))
        inside = torch.fx.symbolic_trace(Residual(layer))
        larger = torch.randn(1, 6, *(7, 3, 2)[:axes])
        torch.testing.assert_close(inside(larger), layer(larger, residual=larger))

    def test_export_with_dynamic_sizes(self, name):
        skip_tied_export(name == "attention_pool")
        model = Residual(built(name)).eval()
        sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
        program = torch.export.export(model, (torch.randn(2, 6, 9, 11),), dynamic_shapes=(sizes,))
        for shape in [(3, 6, 7, 6), (1, 6, 30, 31), (2, 6, 4, 3)]:
            x = torch.randn(shape)
            torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("axes", [2, pytest.param(3, marks=pytest.mark.slow)])
    def test_onnx_with_dynamic_sizes(self, name, axes, tmp_path):
        for library in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(library, reason=f"{library} is not installed")
        import onnxruntime

        model = Residual(built(name, axes=axes)).eval()
        x = torch.randn(2, 6, *(9, 11, 5)[:axes])
        sizes = dict.fromkeys((0, *range(2, 2 + axes)), torch.export.Dim.DYNAMIC)
        torch.onnx.export(
            model, (x,), tmp_path / "model.onnx", dynamo=True, dynamic_shapes=(sizes,), verbose=False, opset_version=18
        )
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        for grid in [(9, 11, 5), (4, 33, 3), (20, 5, 6)]:
            x = torch.randn(3, 6, *grid[:axes])
            (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            torch.testing.assert_close(torch.from_numpy(y), model(x), rtol=1e-4, atol=1e-4)

    def test_state_goes_to_another(self, name):
        layer, other = built(name).eval(), build_context(name, 6).eval()
        other.load_state_dict(layer.state_dict())
        x = torch.randn(2, 6, 5, 6)
        assert torch.equal(other(x), layer(x))

    def test_device_and_dtype(self, name):
        if name not in ("none", "identity"):
            layer = build_context(name, 6, device="meta", dtype=torch.float64)
            assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float64)}

    def test_wrong_channels(self, name):
        with pytest.raises(ValueError, match=r"was built for 6 channels, but \w+ has 5$"):
            build_context(name, 6)(torch.randn(2, 5, 4, 4))

    def test_five_axes(self, name):
        with pytest.raises(ValueError, match=r"a grid of 1 to 4 axes, but its shape \(2, 6, 2, 2, 2, 2, 2\) has 5$"):
            build_context(name, 6)(torch.randn(2, 6, 2, 2, 2, 2, 2))

    @pytest.mark.parametrize(
        ("residual", "error", "message"),
        [
            (torch.zeros(2, 6, 4, 5), ValueError, r"output's shape \(2, 6, 4, 4\), not \(2, 6, 4, 5\)$"),
            (torch.zeros(2, 6, 4, 4).double(), TypeError, "query is float32, residual is float64$"),
            (1.0, TypeError, "residual must be a torch.Tensor, not float$"),
        ],
    )
    def test_wrong_residual(self, name, residual, error, message):
        with pytest.raises(error, match=message):
            build_context(name, 6)(torch.randn(2, 6, 4, 4), residual=residual)

    @pytest.mark.parametrize(
        ("channels", "error", "message"),
        [(0, ValueError, "channels must be at least 1, not 0"), (6.0, TypeError, "channels must be an int, not float")],
    )
    def test_bad_channels(self, name, channels, error, message):
        with pytest.raises(error, match=message):
            build_context(name, channels)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_context
@pytest.mark.parametrize("axes", [2, 3])
def test_on_a_gpu(name, axes, monkeypatch):
    """Output and the input's gradient as on the CPU, in float32 and under autocast, channels last."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    layer = built(name, channels=16, axes=axes)
    last = {2: torch.channels_last, 3: torch.channels_last_3d}[axes]
    x = torch.randn(2, 16, *(9, 11, 5)[:axes], requires_grad=True)
    expected = layer(x, residual=x)
    (gradient,) = torch.autograd.grad(expected.square().sum(), x)
    layer = layer.cuda()
    there = x.detach().cuda().to(memory_format=last).requires_grad_()
    y = layer(there, residual=there)
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-3, atol=1e-3)
    (found,) = torch.autograd.grad(y.square().sum(), there)
    torch.testing.assert_close(found.cpu(), gradient, rtol=1e-2, atol=1e-2)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half = layer(there, residual=there)
    assert half.dtype == torch.bfloat16
    assert half.is_contiguous(memory_format=last)
    # As a whole: a softmax that saturates may multiply one entry's roundings by anything.
    assert (half.float().cpu() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_positions_of_squeeze_axial_learn_by_a_deterministic_gradient():
    """PyTorch refuses that of F.interpolate(mode="linear") on a GPU."""
    layer, x = built("squeeze_axial", channels=16), torch.randn(2, 16, 9, 11)
    positions, tokens = layer.query_positions, x.new_zeros(2, 20, 8)
    upstream = torch.randn(20, 8)
    (expected,) = torch.autograd.grad(positions(tokens, x), positions.weight, upstream)
    positions = positions.cuda()
    torch.use_deterministic_algorithms(True)
    try:
        (found,) = torch.autograd.grad(positions(tokens.cuda(), x.cuda()), positions.weight, upstream.cuda())
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found.cpu(), expected)


class Residual(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, residual=x)


@learning_context
def test_weights_of_another_dtype(name):
    layer, x = build_context(name, 6), torch.randn(2, 6, 4, 4)
    with pytest.raises(TypeError, match="has float32 weights, but x is bfloat16: convert either, or use autocast$"):
        layer(x.bfloat16())
    # Autocast leaves float64 as it is.
    for on in (False, True):
        message = "has float32 weights, but x is float64: convert either$"
        with pytest.raises(TypeError, match=message), torch.autocast("cpu", enabled=on):
            layer(x.double())


def test_checks_copy_nothing():
    """Whatever the input's strides: this grid cannot be seen as one axis."""

    class Watch(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.seen += 1
            return operator(*args, **(kwargs or {}))

    x = torch.randn(2, 6, 9, 9)[..., 2:, 2:]
    residual = torch.randn_like(x)
    with Watch() as watch:
        check_context_input(x, residual, channels=6, axes=None, dtype=None, owner="AxisMeans")
    assert watch.seen == 0


@pytest.mark.parametrize("layer", [CoordinateGate, SqueezeAxial])
def test_another_number_of_axes(layer):
    message = rf"{layer.__name__} was built for 2 axes, but the grid of x, \(2, 3, 4\), has 3$"
    with pytest.raises(ValueError, match=message):
        layer(6)(torch.randn(2, 6, 2, 3, 4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: CoordinateGate(6, axes=5), ValueError, "axes must lie between 1 and 4, not 5"),
        (lambda: SqueezeAxial(6, axes=4), ValueError, "axes must lie between 1 and 3, not 4"),
        (lambda: SqueezeAxial(6, axes=2.0), TypeError, "axes must be an int, not float"),
        (
            lambda: SqueezeAxial(6, num_heads=4),
            ValueError,
            "num_heads must divide value's channels: 4 does not divide 6",
        ),
        (lambda: SqueezeAxial(6, num_heads=3, qk_channels=4), ValueError, "3 does not divide 4"),
        (lambda: AxisMeans(6, mean="twice"), ValueError, "mean must be 'once' or 'each', not 'twice'"),
        (lambda: GlobalContext(6, reduction=0), ValueError, "reduction must be at least 1, not 0"),
        (lambda: CoordinateGate(6, reduction=0.5), TypeError, "reduction must be an int, not float"),
        (
            lambda: build_context("kao_kw", 6),
            ValueError,
            "unknown context 'kao_kw': did you mean 'kao_kv' or 'kao_qkv'? There are none,",
        ),
        (lambda: build_context("zzz", 6), ValueError, "unknown context 'zzz': known are none, identity, global_mean"),
        (
            lambda: build_context("global_mean", 6, heads=2),
            TypeError,
            "global_mean: got an unexpected keyword argument",
        ),
        (lambda: context_builder(3), TypeError, "context must be a name or build a layer from its channels, not int"),
        (lambda: build_context("kao_kv", 6, axes="2"), TypeError, "axes must be an int, not str"),
        (lambda: build_context("kao_kv:positions=learned", 6, axes=2.5), TypeError, "axes must be an int, not float"),
        (lambda: build_context("global_mean", 6, axes=0), ValueError, "axes must be at least 1, not 0"),
        (lambda: build_context("squeeze_axial", 6, qk_channels=0), ValueError, "qk_channels must be at least 1, not 0"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_names_and_layers():
    assert isinstance(build_context("attention", 6), DenseAttention)
    assert build_context("attention_pool", 6).pool == 2
    assert build_context("kao_kv", 6).mode == "kv"
    assert build_context("kao_qkv", 6, num_heads=2).num_heads == 2
    assert build_context("kao_qkv_as_printed", 6).mode == "qkv"


def test_as_printed_counts_the_mean_for_each_axis():
    assert build_context("kao_qkv_as_printed", 6).mean == "each"
    assert build_context("kao_qkv", 6).mean == "once"


def test_a_name_with_options():
    layer = build_context("kao_qkv:positions=learned:num_heads=2:gate=true:coefficient_norm=none", 6, axes=3)
    assert (layer.mode, layer.num_heads, layer.gate, layer.norm) == ("qkv", 2, True, None)
    assert layer.positions.grid == (16, 16, 16)
    assert layer(torch.randn(2, 6, 3, 4, 5)).shape == (2, 6, 3, 4, 5)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("kao_qkv:positions", {}, ValueError, "options are like kao_qkv:positions=learned:gate=true, not 'positions'"),
        ("kao_qvk:gate=true", {}, ValueError, "unknown context 'kao_qvk': did you mean 'kao_qkv'"),
        ("kao_kv:gates=true", {}, TypeError, "kao_kv: got an unexpected keyword argument 'gates'"),
        ("kao_kv:num_heads=2", {"num_heads": 3}, ValueError, "num_heads was given twice, as 2 after kao_kv and as 3"),
        ("attention:pool=2:pool=3", {}, ValueError, "context 'attention:pool=2:pool=3' gives pool twice"),
        (
            "coordinate_gate:axes=3",
            {},
            ValueError,
            "coordinate_gate: axes=3 is not for the name to say: it follows from",
        ),
        ("kao_kv:combine=product", {}, ValueError, 'combine="product" excludes mode="kv"'),
        ("global_mean:positions=learned", {}, TypeError, "global_mean: got an unexpected keyword argument 'positions'"),
    ],
)
def test_a_name_with_bad_options(name, options, error, message):
    with pytest.raises(error) as raised:
        build_context(name, 6, **options)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


# Compiling takes seconds: make test-slow has these three.
_SELDOM = ("attention_pool", "coordinate_gate", "squeeze_axial")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in _SELDOM else name for name in list_contexts()]
)
def test_compiles_whole_without_recompiling(name):
    torch._dynamo.reset()
    layer = built(name)
    # aot_eager of torch 2.15 runs a view in the gate's backward for strides that it does not have.
    backend = "inductor" if name == "coordinate_gate" else "aot_eager"
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    # PyTorch's max-pooling asks about odd and even sizes by itself.
    limit = 4 if name == "attention_pool" else 1
    with torch._dynamo.config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        for grid in [(7, 9), (5, 12), (16, 6)]:
            x = torch.randn(2, 6, *grid, requires_grad=True)
            same = x.detach().clone().requires_grad_()
            compiled(x, residual=x).square().sum().backward()
            # In training a layer's output does not depend on its running statistics, which both calls move.
            layer(same, residual=same).square().sum().backward()
            torch.testing.assert_close(x.grad, same.grad, rtol=1e-3, atol=1e-4)
