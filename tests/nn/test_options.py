"""The layer's options, alone and in any combination, against the reference."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from hypothesis import assume, given
from torch import nn

from kronattn import kronecker_attention, pad_batch, record_coefficients
from kronattn.explain import compare_operators
from kronattn.models.deeplab import ContextHead
from kronattn.models.kanet import KANet
from kronattn.nn import DenseAttention, KroneckerAttention, KroneckerSegmentationHead
from kronattn.nn.positions import AxisPositions
from kronattn.ops import reference
from kronattn.ops.plan import override_plan
from kronattn.ops.triton.availability import interpreted
from tests.nn.options import LayerCase, expected, gradients, kept_keys, layer_cases, shortest_vector
from tests.ops.cases import LARGE, TOLERANCE, random_cases, relative_error

# Of the kernels' own tests: sums of a few more terms than the operators'.
KERNELS = 2e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(case: LayerCase, dtype: torch.dtype, tolerance: float, device: str = "cpu", **stages: str) -> None:
    layer = case.layer()
    tensors, masks = case.inputs()
    # Whatever stands where nothing is must not matter.
    for name, xs in (("mask", tensors[:1]), ("key_mask", tensors[1:])):
        for x in xs if name in masks else ():
            x[(~masks[name]).unsqueeze(1).expand_as(x)] = 100.0
    leaves = [x.requires_grad_() for x in tensors]
    if dtype == torch.float32:
        # A vector of hardly any length has hardly a direction: there the reference itself is as wrong in float32.
        assume(shortest_vector(copy.deepcopy(layer), leaves, masks) >= 0.2)
    exact = expected(layer, leaves, masks, kept_keys(layer, case, dtype, device))
    if case.residual:
        added = leaves[0] if "mask" not in masks else leaves[0] * masks["mask"].unsqueeze(1)
        exact = exact + added
    exact_gradients = gradients(layer, exact, leaves)

    ours = copy.deepcopy(layer).to(device, dtype)
    copies = [x.detach().to(device, dtype).requires_grad_() for x in leaves]
    masks = {name: mask.to(device) for name, mask in masks.items()}
    torch.manual_seed(case.seed)
    with override_plan(**stages):
        y = ours(*copies, residual=copies[0] if case.residual else None, **masks)
    assert relative_error(y.cpu(), exact, 0.1) <= tolerance
    found = gradients(ours, y, copies)
    floor = max([0.1, *(g.abs().max().item() for g in exact_gradients)])
    for actual, gradient in zip(found, exact_gradients, strict=True):
        assert relative_error(actual.cpu(), gradient, floor) <= tolerance


class TestCombinations:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_torch(self, dtype):
        @given(case=layer_cases())
        @random_cases(150)
        def run(case):
            check(case, dtype, TOLERANCE[dtype])

        run()

    @pytest.mark.skipif(DEVICE == "cpu" and not interpreted(), reason="neither a GPU nor Triton's interpreter")
    def test_triton(self):
        @given(case=layer_cases())
        @random_cases(12)
        def run(case):
            check(case, torch.float32, KERNELS, DEVICE, pool="triton", spread="triton")

        run()


ALONE = {
    "positions": {"positions": "learned", "grid": (3, 4)},
    "cosine": {"coefficient_norm": "cosine"},
    "sample": {"coefficient_norm": "sample"},
    "per_axis": {"softmax": "per_axis"},
    "gate": {"gate": True},
    "product": {"mode": "qkv", "combine": "product"},
    "dropout": {"dropout": 0.3},
}
ALL = {
    "positions": "learned",
    "grid": (3, 4),
    "coefficient_norm": "cosine",
    "softmax": "per_axis",
    "gate": True,
    "dropout": 0.3,
}
every_option = pytest.mark.parametrize("name", ALONE)
# Compilers take long: all options together and, with --hypothesis-profile=large, each alone.
BACKEND = "aot_eager" if LARGE else "eager"
for_compilers = pytest.mark.parametrize("name", ["all", *ALONE] if LARGE else ["all"])


def built(name: str, mode: str = "qkv", channels: int = 6, **more) -> KroneckerAttention:
    torch.manual_seed(0)
    together = {**ALL, "combine": "product" if mode == "qkv" else "sum"}
    return KroneckerAttention(channels, **{"mode": mode, **(together if name == "all" else ALONE[name]), **more})


def modes_of(name: str) -> list[str]:
    return ["qkv"] if name == "product" else ["kv", "qkv"]


def calls_of(name: str) -> list[tuple[str, bool]]:
    """Modes, and whether there is a mask."""
    return [(mode, masked) for mode in modes_of(name) for masked in (False, True) if LARGE or masked == (mode == "qkv")]


class Masked(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, mask):
        return self.layer(x, residual=x, mask=mask)


@every_option
class TestEach:
    def test_every_parameter_learns_and_belongs_to_a_module_that_is_called(self, name):
        for mode in modes_of(name):
            layer, called = built(name, mode, layer_scale=0.5), set()
            for key, module in layer.named_modules():
                module.register_forward_hook(lambda *_, key=key, called=called: called.add(key))
            layer(torch.randn(2, 6, 5, 4)).square().sum().backward()
            for key, parameter in layer.named_parameters():
                assert key.rpartition(".")[0] in called
                assert parameter.grad.abs().sum() > 0, key

    def test_nothing_at_first(self, name):
        """With a gain of zero the network is what it was, and the gain learns."""
        for mode in modes_of(name):
            layer, x = built(name, mode, layer_scale=0.0), torch.randn(2, 6, 5, 4)
            y = layer(x, residual=x)
            assert torch.equal(y, x)
            y.square().sum().backward()
            assert layer.layer_scale.gain.grad.abs().max() > 0

    def test_half_precision_and_autocast(self, name):
        for mode in modes_of(name):
            layer, x = built(name, mode).eval(), torch.randn(2, 6, 5, 4)
            exact = layer(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                cast = layer(x)
            halved = layer.to(torch.bfloat16)(x.to(torch.bfloat16))
            for found in (cast, halved):
                assert found.dtype == torch.bfloat16
                assert relative_error(found, exact) < 0.06

    def test_symbolic_tracing(self, name):
        mask = torch.rand(2, 5, 4) < 0.7
        for mode in modes_of(name):
            layer, x = built(name, mode).eval(), torch.randn(2, 6, 5, 4)
            alone = torch.fx.symbolic_trace(layer)
            torch.testing.assert_close(alone(x, residual=x), layer(x, residual=x))
            torch.testing.assert_close(alone(x, mask=mask), layer(x, mask=mask))
            inside = torch.fx.symbolic_trace(Masked(layer))
            torch.testing.assert_close(inside(x, mask), layer(x, residual=x, mask=mask))

    def test_recorded(self, name):
        """Coefficients sum to one, and give the layer's output when they are applied to the values."""
        mask = torch.rand(2, 5, 4) < 0.7
        for mode in modes_of(name):
            layer, x = built(name, mode).double(), torch.randn(2, 6, 5, 4).double()
            for given_mask in (None, mask):
                with record_coefficients(layer) as recorded:
                    y = layer(x, mask=given_mask)
                (call,) = recorded
                torch.testing.assert_close(call.coefficients.sum(dim=2), torch.ones_like(call.coefficients[:, :, 0]))
                output = x * call.output().sigmoid() if name == "gate" else call.output()
                output = output if given_mask is None else output * given_mask.unsqueeze(1)
                torch.testing.assert_close(output, y, rtol=1e-10, atol=1e-10)
                weights = call.at(1, 2)
                torch.testing.assert_close(weights.rows, call.rows[..., 1, 2])
                torch.testing.assert_close(weights.map.sum(), torch.tensor(2.0 * weights.total).double())

    def test_explained(self, name):
        for mode in modes_of(name):
            (comparison,) = compare_operators(built(name, mode).eval(), torch.randn(1, 6, 5, 4))
            assert set(comparison.calls) == {"kv", "qkv", "regular"}

    def test_in_a_network_and_in_heads(self, name):
        settings = {key: value for key, value in ALONE[name].items() if key != "mode"}
        text = ":".join(f"{key}={value}".replace(" ", "") for key, value in settings.items())
        model = KANet("kanet_qkv", num_classes=3, width=0.25, context=f"kao_qkv:{text}")
        model(torch.randn(2, 3, 64, 64)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        spared = model.no_weight_decay()
        assert all((key in spared) == ("norm" in key or "positions" in key)
                   for key, _ in model.named_parameters() if ".attn." in key)  # fmt: skip
        assert ContextHead(16, 3, f"kao_qkv:{text}")(torch.randn(2, 16, 5, 6)).shape == (2, 3, 5, 6)
        if name != "gate":
            head = KroneckerSegmentationHead(16, 3, "qkv", **settings).eval()
            x = torch.randn(2, 16, 5, 6)
            apart = head.classifier(x) + head.context_classifier(head.attn(x))
            torch.testing.assert_close(head(x), apart, rtol=1e-4, atol=1e-5)


@for_compilers
class TestCompilers:
    @pytest.mark.parametrize("training", [True, False] if LARGE else [True])
    def test_torch_compile_without_recompiling(self, name, training):
        for mode, masked in calls_of(name):
            torch._dynamo.reset()
            layer = built(name, mode).train(training)
            if layer.dropout is not None:
                layer.dropout.eval()  # a compiled program's random numbers are its own
            compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, dynamic=True, backend=BACKEND)
            with torch._dynamo.config.patch(error_on_recompile=True):
                for shape in [(2, 6, 5, 8), (3, 6, 7, 9), (4, 6, 11, 4)]:
                    x = torch.randn(shape)
                    mask = torch.rand(shape[0], *shape[2:]) < 0.7 if masked else None
                    torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask), rtol=1e-4, atol=1e-4)

    def test_onnx_with_dynamic_sizes(self, name, tmp_path):
        for library in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(library, reason=f"{library} is not installed")
        import onnxruntime

        for mode, masked in calls_of(name) if LARGE else calls_of(name)[-1:]:
            layer = Masked(built(name, mode)).eval() if masked else built(name, mode).eval()
            sizes = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
            mask_sizes = dict.fromkeys((0, 1, 2), torch.export.Dim.DYNAMIC)
            inputs = (torch.randn(2, 6, 9, 11), *([torch.rand(2, 9, 11) < 0.7] if masked else []))
            shapes = (sizes, mask_sizes)[: len(inputs)]
            path = tmp_path / f"{mode}-{masked}.onnx"
            torch.onnx.export(layer, inputs, path, dynamo=True, dynamic_shapes=shapes, verbose=False, opset_version=18)
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
            for grid in [(9, 11), (4, 33), (20, 5)]:
                inputs = (torch.randn(3, 6, *grid), *([torch.rand(3, *grid) < 0.7] if masked else []))
                if masked:
                    inputs[1][0] = False
                names = [node.name for node in session.get_inputs()]
                (y,) = session.run(None, {key: x.numpy() for key, x in zip(names, inputs, strict=True)})
                torch.testing.assert_close(torch.from_numpy(y), layer(*inputs), rtol=1e-4, atol=1e-4)


@given(case=layer_cases(masks=False))
@random_cases(40)
def test_padded_batches_equal_their_samples(case):
    """With every option; dropout is off in evaluation, and the norm has running statistics."""
    layer = case.layer().eval()
    generator = torch.Generator().manual_seed(case.seed)
    grids = [[int(torch.randint(1, size + 1, (), generator=generator)) for size in case.grid] for _ in range(3)]
    samples = [torch.randn(4, *grid, generator=generator, dtype=torch.float64) for grid in grids]
    batch, mask = pad_batch(samples)
    y = layer(batch, residual=batch, mask=mask)
    for padded, sample in zip(y, samples, strict=True):
        alone = layer(sample[None], residual=sample[None])[0]
        torch.testing.assert_close(padded[(..., *map(slice, sample.shape[1:]))], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_statistics_count_what_is_there(mode):
    """A padded sample's coefficients have the statistics that they have alone; of nothing, nothing is learned."""
    layer = KroneckerAttention(4, mode).double()
    alone, x = copy.deepcopy(layer), torch.randn(1, 4, 3, 5).double()
    batch, mask = pad_batch([x[0], torch.randn(4, 6, 2).double()])
    mask[1] = False
    torch.testing.assert_close(layer(batch, mask=mask)[:1, :, :3], alone(x))
    torch.testing.assert_close(layer.norm.running_var, alone.norm.running_var)
    torch.testing.assert_close(layer.norm.running_mean, alone.norm.running_mean)
    before, batch = layer.norm.running_var.clone(), batch.requires_grad_()
    y = layer(batch, mask=torch.zeros_like(mask))
    assert not y.any()
    y.sum().backward()
    assert all(x.grad.isfinite().all() for x in (batch, *layer.parameters()))
    assert torch.equal(layer.norm.running_var, before)


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_gradients_of_gradients(mode):
    layer = built("all", mode, channels=2, grid=(2, 3)).double().eval()
    x = torch.randn(2, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(2, 3, 2, dtype=torch.bool)
    mask[1, 1:] = False
    for masks in ({}, {"mask": mask}):
        call = functools.partial(layer, **masks)
        assert torch.autograd.gradcheck(call, x, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, x, fast_mode=True)


class TestMeaning:
    @pytest.mark.parametrize("axes", [2, 3, 4])
    @pytest.mark.parametrize("level", [3.0, -0.5, 0.0])
    def test_a_product_of_a_constant_grid_is_that_grid(self, axes, level):
        layer = KroneckerAttention(2, "qkv", project="", combine="product").double()
        x = torch.full((2, 2, *range(2, 2 + axes)), level, dtype=torch.float64)
        torch.testing.assert_close(layer(x), x, rtol=1e-9, atol=1e-12)

    def test_a_product_is_of_rank_one(self):
        y = KroneckerAttention(3, "qkv", combine="product")(torch.randn(2, 3, 5, 6) + 1)
        assert torch.linalg.matrix_rank(y, rtol=1e-5).unique().tolist() == [1]

    def test_a_gate_opens_and_shuts(self):
        layer, x = KroneckerAttention(6, "qkv", gate=True), torch.randn(2, 6, 5, 4)
        ratio = layer(x) / x
        assert 0 < ratio.min() < ratio.max() < 1

    def test_cosines_ignore_lengths(self):
        layer, x = KroneckerAttention(6, "kv", coefficient_norm="cosine", project="").eval(), torch.randn(1, 6, 5, 4)
        with record_coefficients(layer) as recorded:
            layer(x), layer(x * 100)
        torch.testing.assert_close(recorded[0].coefficients, recorded[1].coefficients)
        assert recorded[0].keys.norm(dim=2).allclose(layer.norm.weight.detach())

    @pytest.mark.parametrize("mode", ["kv", "qkv"])
    def test_a_norm_of_each_sample_ignores_its_size_and_the_others(self, mode):
        torch.manual_seed(0)
        layer, x = (
            KroneckerAttention(6, mode, coefficient_norm="sample", project="", num_heads=2),
            torch.randn(3, 6, 5, 4),
        )
        with record_coefficients(layer) as recorded:
            layer(x), layer(x * torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1, 1)), layer(x[1:2])
        whole, resized, alone = (each.coefficients for each in recorded)
        torch.testing.assert_close(resized, whole, rtol=0, atol=1e-4)
        torch.testing.assert_close(alone, whole[1:2])

    def test_a_norm_of_each_sample_bounds_the_gradient_of_a_large_one(self):
        """What a norm over the batch does not. A network has ten layers in a row, and each multiplies by that."""
        torch.manual_seed(0)
        x = torch.randn(32, 16, 5, 4)
        x[0] *= 10
        largest = {}
        for norm in ("batch", "sample"):
            layer, leaf = KroneckerAttention(16, "qkv", coefficient_norm=norm), x.clone().requires_grad_()
            (layer(leaf) * torch.randn_like(x)).sum().backward()
            lengths = leaf.grad.flatten(1).norm(dim=1)
            largest[norm] = lengths[0] / lengths[1:].median()
        assert largest["sample"] < 1.5
        assert largest["batch"] > 2.5

    @pytest.mark.parametrize("project", ["v", "qkv"])
    def test_regular_attention_has_the_norm_of_each_sample_too(self, project):
        layer = DenseAttention(6, coefficient_norm="sample", project=project, num_heads=2).double()
        # The same number in two ways: a product of few keys with each other, or of their many channels.
        assert (layer.norm.few, KroneckerAttention(6, coefficient_norm="sample").norm.few) == (False, True)
        nn.init.constant_(layer.norm.weight, 1.5)
        x = torch.randn(3, 6, 5, 4, dtype=torch.float64)
        q, k, v = (
            x if linear is None else linear(x.movedim(1, -1)).movedim(-1, 1)
            for linear in (layer.query_map, layer.key_map, layer.value_map)
        )
        exact = reference.attention(q, k, v, num_heads=2, sample_norm=layer.norm.weight)
        torch.testing.assert_close(layer(x), exact)

    def test_positions_are_those_of_a_resized_image(self):
        positions = AxisPositions(3, (4, 7))
        rows, columns = positions(torch.empty(1, 1, 9, 5))[0].split([5, 9])[::-1]
        tables = positions.vectors.split([7, 4])[::-1]
        for found, table in zip((rows, columns), tables, strict=True):
            exact = nn.functional.interpolate(table.t()[None], size=len(found), mode="linear")[0].t()
            torch.testing.assert_close(found, exact)
        own = positions(torch.empty(1, 1, 4, 7))[0]
        assert torch.equal(own, positions.vectors)

    def test_positions_tell_places_apart(self):
        """Without them, every row and column of a constant image gets the same."""
        x = torch.ones(1, 6, 5, 4)
        for mode in ("kv", "qkv"):
            layer = KroneckerAttention(6, mode, positions="learned", coefficient_norm=None).eval()
            nn.init.normal_(layer.positions.vectors)
            with record_coefficients(layer) as recorded:
                layer(x)
            assert recorded[0].coefficients.std(dim=-1).min() > 1e-3

    def test_dropout_leaves_out_keys_and_keeps_the_mean(self):
        layer, x = KroneckerAttention(6, "kv", num_heads=2, dropout=0.5, project=""), torch.rand(1, 6, 5, 4) + 1
        layer.norm.eval()
        with record_coefficients(layer) as recorded:
            outputs = torch.stack([layer(x) for _ in range(400)])
        values = recorded[0].values.unflatten(1, (2, 3))
        left_out = (values == 0).all(dim=2)
        assert torch.equal(left_out, (values == 0).any(dim=2))
        assert left_out.any()
        assert not left_out.all()
        assert not torch.equal(left_out[:, 0], left_out[:, 1])
        assert relative_error(outputs.mean(0), layer.eval()(x)) < 0.15


X = torch.randn(2, 4, 5, 6)
MASK = torch.ones(2, 5, 6, dtype=torch.bool)
PRODUCT = {"mode": "qkv", "combine": "product"}
BAD = {
    "positions": (lambda: KroneckerAttention(4, positions="sine"), "positions must be 'learned' or None, not 'sine'"),
    "axes": (
        lambda: KroneckerAttention(4, positions="learned")(torch.randn(2, 4, 5, 6, 7)),
        'positions="learned" was built for 2 axes (grid=(16, 16)), but the grid (5, 6, 7) has 3',
    ),
    "places": (
        lambda: KroneckerAttention(4, positions="learned", grid=(3, 0)),
        "grid must have at least one position on every axis, not (3, 0)",
    ),
    "softmax": (
        lambda: KroneckerAttention(4, softmax="each"),
        "softmax must be one of 'joint', 'per_axis', not 'each'",
    ),
    "combine": (lambda: KroneckerAttention(4, combine="max"), "combine must be one of 'sum', 'product', not 'max'"),
    "norm": (
        lambda: KroneckerAttention(4, coefficient_norm="cos"),
        "coefficient_norm must be one of 'batch', 'batch_per_key', 'cosine', 'sample', None, not 'cos'",
    ),
    "product of positions": (
        lambda: KroneckerAttention(4, combine="product"),
        'combine="product" excludes mode="kv": every position asks for itself, nothing is multiplied',
    ),
    "product and mean": (
        lambda: KroneckerAttention(4, **PRODUCT, mean="each"),
        'combine="product" excludes mean="each": the mean is counted in sums alone',
    ),
    "product of one axis": (
        lambda: KroneckerAttention(4, **PRODUCT)(torch.randn(2, 4, 5)),
        'combine="product" multiplies axes with each other, but the grid (5,) has one',
    ),
    "function": (
        lambda: kronecker_attention(torch.randn(2, 4, 5), **PRODUCT),
        'combine="product" multiplies axes with each other, but the grid (5,) has one',
    ),
    "gate": (lambda: KroneckerAttention(4, gate="yes"), "gate must be True or False, not 'yes'"),
    "gate and channels": (
        lambda: KroneckerAttention(4, gate=True, out_channels=8),
        "gate=True excludes out_channels=8: the input is gated by its attention's map, channel by channel",
    ),
    "gate and maps": (
        lambda: KroneckerAttention(4, gate=True, project="qk"),
        "gate=True excludes project='qk': the input is gated by its attention's map, channel by channel",
    ),
    "gate and map_values": (
        lambda: KroneckerAttention(4, gate=True)(X, map_values=nn.Identity()),
        "map_values excludes gate=True: the output is not linear in the values",
    ),
    "product and map_values": (
        lambda: KroneckerAttention(4, **PRODUCT)(X, map_values=nn.Identity()),
        'map_values excludes combine="product": the output is not linear in the values',
    ),
    "dropout": (lambda: KroneckerAttention(4, dropout=1.0), "dropout must be a number from 0 up and below 1, not 1.0"),
    "mask and keys": (
        lambda: KroneckerAttention(4, coefficient_norm="batch_per_key", grid=(5, 6))(X, mask=MASK),
        'coefficient_norm="batch_per_key" excludes mask: use coefficient_norm="batch"',
    ),
    "mask shape": (
        lambda: KroneckerAttention(4)(X, mask=MASK[:, None]),
        "mask must be query's (N, *grid), (2, 5, 6), not (2, 1, 5, 6)",
    ),
    "mask dtype": (
        lambda: KroneckerAttention(4)(X, mask=MASK.float()),
        "mask must be torch.bool, true where query has data, not float32",
    ),
    "mask type": (lambda: kronecker_attention(X, mask=[True]), "mask must be a torch.Tensor, not list"),
    "mask device": (
        lambda: kronecker_attention(X, mask=MASK.to("meta")),
        "mask must be on query's device: query is on cpu, mask on meta",
    ),
    "key mask shape": (
        lambda: KroneckerAttention(4)(X, torch.randn(2, 4, 7), key_mask=MASK),
        "key_mask must be key's (N, *grid), (2, 7), not (2, 5, 6)",
    ),
    "key mask alone": (
        lambda: KroneckerAttention(4)(X, key_mask=MASK),
        "key_mask was given without a key of its own: self-attention has one mask, mask",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, message = BAD[name]
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    assert str(raised.value) == message


def test_repr_and_plan():
    layer = KroneckerAttention(4, **PRODUCT, softmax="per_axis", gate=True)
    assert "mode='qkv', combine='product', softmax='per_axis', gate=True" in repr(layer)
    assert layer.plan(X, masked=True).spread == "torch"
    with override_plan(pool="triton", spread="triton"):
        plan = layer.plan(X, masked=True)
    assert (plan.pool, plan.spread) == ("triton", "torch")
    assert plan.reason == "a mask: the kernels' bias of keys is the same for all samples"


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["all", *ALONE])
def test_half_precision_on_a_gpu(name, masked):
    """Where the planner picks the kernels: output and the input's gradient near those of float32 on the CPU."""
    for mode in modes_of(name):
        layer, x = built(name, mode, channels=16).eval(), torch.randn(2, 16, 13, 11, requires_grad=True)
        mask = torch.rand(2, 13, 11) < 0.7 if masked else None
        exact = layer(x, residual=x, mask=mask)
        (gradient,) = torch.autograd.grad(exact.square().sum(), x)
        there = x.detach().to("cuda", memory_format=torch.channels_last).requires_grad_()
        layer = layer.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert layer.plan(there, masked=masked).spread == ("torch" if masked else "triton")
            y = layer(there, residual=there, mask=None if mask is None else mask.cuda())
        assert relative_error(y.float().cpu(), exact) < 0.06
        (found,) = torch.autograd.grad(y.float().square().sum(), there)
        assert relative_error(found.cpu(), gradient) < 0.1
