"""The fused kernels against the float64 reference: on a GPU where there is one, in Triton's interpreter elsewhere.

Memory that the launchers allocate is filled with NaN beforehand, so that whatever a kernel leaves out shows.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from kronattn import attention, kronecker_attention
from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.ops import reference, torch_backend
from kronattn.ops.coefficients import Moments
from kronattn.ops.plan import Plan, explain_plan, kernels_unsupported_reason, override_plan
from kronattn.ops.stages import combine_tokens
from kronattn.ops.triton import availability
from kronattn.ops.triton.availability import interpreted
from tests.ops.cases import lay_out, poison_empty, relative_error

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
MODES = ("kv", "qkv")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}

if not ON_GPU and not interpreted():
    pytest.skip("neither a GPU nor Triton's interpreter", allow_module_level=True)

# batch, channels, height, width, heads
# The last two have more keys than one block holds.
SMALL = [
    (1, 8, 7, 7, 1),
    (3, 12, 5, 9, 3),
    (2, 40, 13, 4, 2),
    (1, 16, 1, 6, 1),
    (2, 5, 3, 1, 1),
    (1, 4, 2, 131, 1),
    (1, 8, 140, 3, 2),
]
LARGE = [
    (2, 64, 29, 29, 1),
    (1, 24, 63, 111, 2),
    (2, 96, 14, 14, 1),
    (3, 160, 7, 7, 4),
    (1, 64, 56, 56, 1),
    (2, 32, 28, 28, 1),
    (1, 512, 13, 29, 1),
    (2, 512, 14, 7, 8),
    (1, 8, 200, 131, 1),
    (150, 64, 14, 14, 1),
    (140, 32, 28, 28, 1),
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison_empty(monkeypatch)


def noise(*shape, dtype=torch.float32, seed=0, layout="contiguous"):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return lay_out(x.to(DEVICE, dtype), layout)


def results(tensors, backend, **options):
    """Output, and the gradients of all tensors and of the scale where it is a tensor."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    wanted = leaves
    if isinstance(options.get("scale"), torch.Tensor):
        options["scale"] = options["scale"].detach().to(leaves[0].dtype).requires_grad_()
        wanted = [*leaves, options["scale"]]
    output = kronecker_attention(*leaves, backend=backend, **options)
    weights = noise(*output.shape, seed=9, dtype=output.dtype)
    return [output, *torch.autograd.grad(output, wanted, weights)]


def check(tensors, **options):
    exact = results([x.double() for x in tensors], "reference", **options)
    ours = results(tensors, "triton", **options)
    assert ours[0].dtype == tensors[0].dtype
    if tensors[0].stride(1) == 1 and tensors[0].is_contiguous(memory_format=torch.channels_last):
        assert ours[0].is_contiguous(memory_format=torch.channels_last)
    for actual, expected in zip(ours, exact, strict=True):
        assert relative_error(actual, expected, floor=0.1) <= TOLERANCE[tensors[0].dtype]
    if ON_GPU:
        again = results(tensors, "triton", **options)
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


class TestSelfAttention:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("shape", SMALL, ids=str)
    def test_equals_the_reference(self, shape, mode):
        *sizes, heads = shape
        for layout, dtype in (("channels_last", torch.bfloat16), ("contiguous", torch.float32)):
            mean = "once" if layout == "contiguous" else "each"
            check([noise(*sizes, dtype=dtype, layout=layout)], mode=mode, num_heads=heads, scale=0.7, mean=mean)

    @pytest.mark.gpu
    @pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
    @pytest.mark.parametrize("shape", LARGE, ids=str)
    def test_large(self, shape, mode, dtype):
        *sizes, heads = shape
        for layout in ("channels_last", "contiguous"):
            check([noise(*sizes, dtype=dtype, layout=layout)], mode=mode, num_heads=heads, scale=0.5)

    @pytest.mark.parametrize("layout", ["transposed", "sliced", "expanded"])
    def test_other_layouts(self, layout):
        check([noise(2, 6, 4, 5, layout=layout)], mode="kv")

    @pytest.mark.parametrize("mode", MODES)
    def test_half_precision_does_not_overflow(self, mode):
        x = noise(1, 8, 6, 7, dtype=torch.float16) * 100
        assert torch.isfinite(kronecker_attention(x, mode=mode, backend="triton")).all()

    @pytest.mark.parametrize("mode", MODES)
    def test_same_input_same_bits(self, mode):
        x = noise(2, 16, 9, 11, dtype=torch.bfloat16)
        first, second = (results([x], "triton", mode=mode, num_heads=2) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    @pytest.mark.parametrize("mode", MODES)
    def test_gradients_of_gradients(self, mode):
        x = noise(1, 4, 3, 4).requires_grad_()

        def penalty(backend, x):
            y = kronecker_attention(x, mode=mode, backend=backend)
            (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            return torch.autograd.grad(gradient.square().sum(), x)[0]

        exact = penalty("reference", x.detach().double().requires_grad_())
        assert relative_error(penalty("triton", x), exact) < 1e-4


class TestGenericAttention:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(
        "shapes",
        [
            [(2, 8, 9)],
            [(2, 8, 3, 2, 4)],
            [(1, 8, 2, 3, 2, 3)],
            [(2, 8, 5, 6), (2, 8, 3, 4)],
            [(2, 8, 5, 6), (2, 8, 7), (2, 12, 7)],
            [(1, 8, 2, 3, 4), (1, 8, 3, 4), (1, 4, 3, 4)],
        ],
        ids=str,
    )
    def test_grids_and_tensors(self, shapes, mode):
        scale = torch.tensor([0.3, 1.2], device=DEVICE)
        for dtype, layout, factor in ((torch.float32, "contiguous", scale), (torch.bfloat16, "channels_last", 0.7)):
            tensors = [noise(*shape, dtype=dtype, seed=i, layout=layout) for i, shape in enumerate(shapes)]
            check(tensors, mode=mode, num_heads=2, scale=factor)

    def test_regular_attention(self):
        x = noise(2, 8, 5, 6)
        ours = attention(x, num_heads=2, backend="triton")
        assert relative_error(ours, attention(x.double(), num_heads=2, backend="reference")) < 1e-5


class TestStages:
    """The kernels one by one: averages, attention to keys with a bias and a residual, moments."""

    @pytest.mark.parametrize("shape", [(2, 3, 5, 6), (2, 3, 33, 5), (2, 3, 2, 150), (2, 3, 3, 4, 5), (1, 1032, 2, 3)])
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_pool(self, shape, layout):
        from kronattn.ops.triton.operators import pool

        x = noise(*shape, dtype=torch.bfloat16, layout=layout).requires_grad_()
        tokens, on = pool(x)
        assert tokens.dtype == torch.float32
        assert torch.equal(on, x)
        assert relative_error(tokens.transpose(1, 2), reference.axis_averages(x.double())) < 1e-5
        weights = noise(*tokens.shape, seed=1), noise(*x.shape, seed=2, dtype=x.dtype)
        (gradient,) = torch.autograd.grad([tokens, on], x, weights)
        wide = x.detach().double().requires_grad_()
        averages = reference.axis_averages(wide).transpose(1, 2)
        (exact,) = torch.autograd.grad([averages, wide.clone()], wide, [w.double() for w in weights])
        assert relative_error(gradient, exact) < 1e-2

    def test_pool_adds_parts(self):
        """Strips of rows and tiles of columns, whatever the sizes would ask for."""
        from kronattn.ops.triton.pool import pool_forward
        from kronattn.ops.triton.tuning import PoolBlocks

        x = noise(2, 5, 10, 11)
        blocks = PoolBlocks(2, 4, 16, 3, 1, 3, 4, 2, 4, 0)
        tokens = pool_forward(x, blocks=blocks)
        assert relative_error(tokens.transpose(1, 2), reference.axis_averages(x.double())) < 1e-6

    @pytest.mark.parametrize("count", [21, 150])
    @pytest.mark.parametrize("itself", [False, True])
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_spread(self, count, itself, layout):
        from kronattn.ops.triton.operators import spread

        values = 8 if itself else 6
        shapes = {"query": (2, 8, 4, 9), "keys": (2, count, 8), "values": (2, count, values), "key_bias": (2, count)}
        if not itself:
            shapes["residual"] = (2, 6, 4, 9)
        tensors = {name: noise(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
        tensors["query"] = lay_out(tensors["query"], layout)

        def run(call, dtype):
            inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in tensors.items()}
            more = {"residual": inputs["query"]} if itself else {}
            y = call(**inputs, **more, num_heads=2)
            return [y, *torch.autograd.grad(y, list(inputs.values()), noise(*y.shape, seed=5, dtype=dtype))]

        exact = run(torch_backend.spread, torch.float64)
        for actual, expected in zip(run(spread, torch.float32), exact, strict=True):
            assert relative_error(actual, expected) < 1e-5

    @pytest.mark.parametrize("residual", [False, True])
    @pytest.mark.parametrize("grid", [(4, 9), (2, 3, 4), (7,)], ids=str)
    def test_spread_tokens(self, residual, grid):
        from kronattn.ops.triton.operators import spread_tokens

        inputs = [noise(2, sum(grid), 6, seed=1), noise(2, 6, *grid, seed=2)]

        def run(call, dtype):
            tokens, added = (x.to(dtype).requires_grad_() for x in inputs)
            y = call(tokens, added.detach(), residual=added if residual else None)
            wanted = [tokens, added] if residual else [tokens]
            return [y, *torch.autograd.grad(y, wanted, noise(*y.shape, seed=5, dtype=dtype))]

        exact = run(torch_backend.spread_tokens, torch.float64)
        for actual, expected in zip(run(spread_tokens, torch.float32), exact, strict=True):
            assert relative_error(actual, expected) < 1e-5

    @pytest.mark.parametrize("count", [13, 150])
    @pytest.mark.parametrize("offset", [0.0, 5.0])
    def test_moments(self, count, offset):
        from kronattn.ops.triton.operators import moments

        query, keys = noise(2, 8, 5, 7, seed=1) + offset, noise(2, count, 8, seed=2) + offset

        def run(kernels, dtype):
            q, k = query.to(dtype).requires_grad_(), keys.to(dtype).requires_grad_()
            if kernels:
                found, *on = moments(q, k, num_heads=2)
            else:
                found, *on = torch_backend.moments(q, k, num_heads=2), q, k
            outputs = [found.mean, found.squares, *(x.clone() for x in on)]
            weights = [noise(*x.shape, seed=3 + i, dtype=dtype) for i, x in enumerate(outputs)]
            return [found.members, *outputs, *torch.autograd.grad(outputs, [q, k], weights)]

        ours, exact = run(True, torch.float32), run(False, torch.float64)
        assert ours[0] == exact[0]
        for actual, expected in zip(ours[1:], exact[1:], strict=True):
            assert relative_error(actual, expected) < (1e-4 if offset else 1e-5)

    def test_moments_gradients_of_gradients(self):
        from kronattn.ops.triton.operators import moments

        query, keys = noise(1, 4, 3, 2, seed=1), noise(1, 5, 4, seed=2)

        def penalty(kernels, dtype):
            q, k = query.to(dtype).requires_grad_(), keys.to(dtype).requires_grad_()
            found = moments(q, k)[0] if kernels else torch_backend.moments(q, k)
            gradients = torch.autograd.grad(found.squares.square().sum(), [q, k], create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in gradients), [q, k])

        for actual, expected in zip(penalty(True, torch.float32), penalty(False, torch.float64), strict=True):
            assert relative_error(actual, expected) < 1e-4

    @pytest.mark.parametrize(("heads", "channels"), [(1, 5), (3, 6), (1, 1100)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_normalise(self, heads, channels, dtype):
        """The norm's arithmetic, its running statistics and gradients, against the norm in PyTorch."""
        keys = noise(3, 7, channels, seed=1, dtype=dtype)
        found = noise(heads, seed=2).double(), noise(heads, seed=3).double().square()
        weights = noise(3, 7, channels, seed=4, dtype=dtype)

        def run(kernels, dtype):
            norm = CoefficientNorm(heads).to(keys.device)
            torch.nn.init.uniform_(norm.weight, 0.5, 2.0, generator=torch.Generator(keys.device).manual_seed(5))
            norm = norm if kernels else norm.double()
            x = keys.to(dtype).requires_grad_()
            mean, squares = (part.to(torch.float32 if kernels else dtype).requires_grad_() for part in found)
            plan = Plan("triton", "triton", "a test") if kernels else None
            y, bias = norm(x, Moments(147, mean, squares), plan)
            assert bias is None
            gradients = torch.autograd.grad(y, [x, squares, norm.weight], weights.to(dtype))
            running = norm.running_mean, norm.running_var
            norm.eval()
            with torch.no_grad():
                return [y, *gradients, *running, norm.num_batches_tracked, norm(x, None, plan)[0]]

        for actual, expected in zip(run(True, dtype), run(False, torch.float64), strict=True):
            assert relative_error(actual, expected) < (1e-5 if dtype == torch.float32 else 1e-2)

    def test_normalise_gradients_of_gradients(self):
        keys = noise(2, 3, 4, seed=1)

        def penalty(plan, dtype):
            norm = CoefficientNorm(2).to(keys.device, dtype)
            x, squares = keys.to(dtype).requires_grad_(), noise(2, seed=2).to(dtype).square().requires_grad_()
            y, _ = norm(x, Moments(24, squares.detach(), squares), plan)
            gradients = torch.autograd.grad(y.square().sum(), [x, squares], create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in gradients), [x, squares, norm.weight])

        ours = penalty(Plan("triton", "triton", "a test"), torch.float32)
        for actual, expected in zip(ours, penalty(None, torch.float64), strict=True):
            assert relative_error(actual, expected) < 1e-4

    @pytest.mark.parametrize(("positions", "count", "channels"), [(5, 7, 3), (40, 16, 70), (600, 1, 2)])
    def test_between_matrix_products(self, positions, count, channels):
        """What wide layers do to keys and coefficients, with gradients that come from everywhere at once."""
        from kronattn.ops import matrix_products
        from kronattn.ops.triton import wide

        queries, keys = noise(2, positions, channels, seed=1) + 2, noise(2, count, channels, seed=2) + 2

        def run(functions, plan, dtype):
            q, k = queries.to(dtype).requires_grad_(), keys.to(dtype).requires_grad_()
            norm = CoefficientNorm().to(q.device, dtype)
            rows = functions.centred(k, dtype)
            matrix = q @ rows.transpose(1, 2)
            moments, matrix = functions.moments(matrix, count)
            softmax, _ = norm(matrix, moments, plan, softmax_of=count)
            outputs = [rows, matrix.clone(), moments.mean, moments.squares, softmax]
            weights = [noise(*x.shape, seed=3 + i, dtype=dtype) for i, x in enumerate(outputs)]
            assert moments.members == 2 * positions * count
            statistics, running = dict(norm.named_buffers()), norm.eval()(matrix, None, None, softmax_of=count)[0]
            with torch.no_grad():
                by_running, _ = norm(matrix, None, plan, softmax_of=count)
            assert relative_error(by_running, running) < 1e-5
            return [*outputs, *statistics.values(), *torch.autograd.grad(outputs, [q, k, norm.weight], weights)]

        ours = run(wide, Plan("triton", "matrix_products", "a test"), torch.float32)
        for actual, expected in zip(ours, run(matrix_products, None, torch.float64), strict=True):
            assert relative_error(actual, expected) < 1e-5

    def test_between_matrix_products_gradients_of_gradients(self):
        from kronattn.ops import matrix_products
        from kronattn.ops.triton import wide

        def penalty(functions, plan, dtype):
            q, k = (noise(1, n, 4, seed=n).to(dtype).requires_grad_() for n in (6, 5))
            norm = CoefficientNorm().to(q.device, dtype)
            moments, matrix = functions.moments(q @ functions.centred(k, dtype).transpose(1, 2), 5)
            softmax, _ = norm(matrix, moments, plan, softmax_of=5)
            loss = softmax.square().sum() + moments.mean.square().sum() + moments.squares.square().sum()
            gradients = torch.autograd.grad(loss, [q, k], create_graph=True)
            return torch.autograd.grad(sum(g.square().sum() for g in gradients), [q, k, norm.weight])

        ours = penalty(wide, Plan("triton", "matrix_products", "a test"), torch.float32)
        for actual, expected in zip(ours, penalty(matrix_products, None, torch.float64), strict=True):
            assert relative_error(actual, expected) < 1e-4

    @pytest.mark.parametrize("channels", [5, 70])
    @pytest.mark.parametrize("few", [0, 256])
    def test_the_mean_counted_once_while_tokens_are_added_up(self, monkeypatch, few, channels):
        """By every program of the outer sum for itself, or by a kernel before it."""
        from kronattn.ops.triton import outer

        monkeypatch.setattr(outer, "_FEW_TOKENS", few)
        tokens, like = noise(2, 9 + 40, channels, seed=1), noise(2, channels, 40, 9, seed=2)

        def run(pool, dtype):
            x, residual = tokens.to(dtype).requires_grad_(), like.to(dtype)
            y = combine_tokens(x, residual, Plan(pool, pool, "a test"), mean="once", residual=residual)
            return y, *torch.autograd.grad(y, x, noise(*y.shape, seed=3, dtype=dtype))

        for actual, expected in zip(run("triton", torch.float32), run("torch", torch.float64), strict=True):
            assert relative_error(actual, expected) < 1e-5

    def test_several_parts_are_added(self):
        """Ranges of positions in programs of their own, whatever the sizes would ask for."""
        from kronattn.ops.triton.attend import attend_backward
        from kronattn.ops.triton.moments import moments_backward, moments_forward
        from kronattn.ops.triton.tuning import AttendBlocks

        blocks = AttendBlocks(16, 32, 16, 16, 3, 32, 4, 1)
        query, keys, values, d_y = noise(2, 8, 9, 8), noise(2, 17, 8), noise(2, 17, 6), noise(2, 6, 9, 8, seed=4)
        whole, parts = (
            attend_backward(query, d_y, keys, values, None, 1, torch.float32, False, blocks=b)[:2]
            for b in (None, blocks)
        )
        mean, squares = moments_forward(query, keys, 1)
        whole += (mean, squares, *moments_backward(query, keys, mean, mean, squares, None, keys, 1))
        parts += moments_forward(query, keys, 1, blocks=blocks)
        parts += moments_backward(query, keys, mean, mean, squares, None, keys, 1, blocks=blocks)
        for actual, expected in zip(parts, whole, strict=True):
            assert relative_error(actual, expected) < 1e-5


class TestLibrary:
    def test_opcheck(self):
        from kronattn.ops.triton import operators

        x = noise(2, 8, 3, 5, layout="channels_last")
        tokens, bias = noise(2, 8, 8), noise(2, 8, seed=2)
        number = noise(2, seed=4)
        calls = [
            (operators._pool, (x, True, torch.float32)),
            (operators._pool, (x.contiguous(), False, torch.bfloat16)),
            (operators._outer_sum, (tokens, None, [3, 5], True, torch.float32, True)),
            (operators._outer_sum, (tokens, x, [3, 5], False, torch.bfloat16, False)),
            (operators._attend, (x, tokens, tokens, bias, x, 2)),
            (operators._attend, (x.contiguous(), tokens, tokens, None, None, 1)),
            (operators._attend_backward, (x, x, tokens, tokens, bias, 2, torch.bfloat16, True)),
            (operators._attend_backward, (x, x.contiguous(), tokens, tokens, None, 1, torch.float32, False)),
            (operators._moments, (x, tokens, 2)),
            (operators._moments_backward, (x, tokens, number, number, number, x.contiguous(), tokens, 2)),
            (operators._moments_backward, (x, tokens, number, None, number, None, None, 2)),
            (operators._mean_once, (tokens, [3, 5])),
        ]
        for operator, arguments in calls:
            torch.library.opcheck(operator, arguments)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_compiles_without_breaks_or_recompiling(self, mode, layout):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: kronecker_attention(x, mode=mode, num_heads=2, backend="triton"),
            fullgraph=True,
            dynamic=True,
            backend="inductor" if ON_GPU else "aot_eager",
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            for shape in [(2, 4, 5, 6), (3, 4, 7, 9), (5, 4, 3, 12)]:
                x = noise(*shape, layout=layout).requires_grad_()
                y = x.detach().clone().requires_grad_()
                output, expected = compiled(x), kronecker_attention(y, mode=mode, num_heads=2, backend="triton")
                torch.testing.assert_close(output, expected)
                output.square().sum().backward()
                expected.square().sum().backward()
                torch.testing.assert_close(x.grad, y.grad)

    def test_operations_are_counted(self):
        x = noise(2, 8, 5, 6)
        with FlopCounterMode(display=False) as counted:
            kronecker_attention(x, backend="triton")
        assert counted.get_total_flops() == 2 * 2 * 30 * 11 * 2 * 8

    @pytest.mark.parametrize("strict", [False, True])
    def test_export_refuses_kernels(self, strict):
        class Operator(torch.nn.Module):
            def forward(self, x):
                return kronecker_attention(x, backend="triton")

        with pytest.raises(Exception, match="exported programs must run without Triton"):
            torch.export.export(Operator(), (noise(2, 4, 5, 6),), strict=strict)

    def test_compile_takes_the_kernels(self):
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs):
            graphs.append(str(graph.graph))
            return graph

        with override_plan(pool="triton", spread="triton"):
            torch.compile(lambda x: kronecker_attention(x), fullgraph=True, backend=backend)(noise(2, 4, 5, 6))
        assert len(graphs) == 1
        assert "kronattn" in graphs[0]

    @pytest.mark.gpu
    @pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
    @pytest.mark.parametrize("mode", MODES)
    def test_graph_capture(self, mode):
        x = noise(4, 16, 9, 11, dtype=torch.bfloat16)
        expected = kronecker_attention(x, mode=mode)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = kronecker_attention(x, mode=mode)
        graph.replay()
        assert torch.equal(y, expected)


class TestChoice:
    def test_a_cpu_tensor_is_refused_by_name(self, monkeypatch):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(
            ValueError, match="backend 'triton' cannot run here: it needs a CUDA tensor, and query is on cpu"
        ):
            kronecker_attention(torch.randn(1, 2, 3, 3), backend="triton")

    @pytest.mark.parametrize(
        ("shape", "dtype", "reason"),
        [
            ((1, 2, 3, 3), torch.float64, "not in float64"),
            ((1, 1024, 3, 3), torch.float32, "up to 512 channels, not 1024"),
            ((0, 2, 3, 3), torch.float32, "the batch is empty"),
        ],
    )
    def test_reasons(self, shape, dtype, reason):
        x = torch.zeros(shape, dtype=dtype, device=DEVICE)
        with pytest.raises(ValueError, match=reason):
            kronecker_attention(x, backend="triton")
        assert kronecker_attention(x).shape == x.shape

    def test_samples_past_int32_are_refused(self):
        x = torch.zeros(1, device=DEVICE).expand(1, 2, 2**15, 2**15)
        assert "fewer than 2**31 elements" in kernels_unsupported_reason(x, x, x)

    def test_transforms_take_the_plain_path(self):
        x = noise(3, 2, 4, 3, 3)
        mapped = torch.func.vmap(kronecker_attention)(x)
        torch.testing.assert_close(mapped, torch.stack([kronecker_attention(sample) for sample in x]))

    def test_auto_keeps_cpu_tensors_on_the_torch_backend(self):
        plan = explain_plan(torch.randn(1, 2, 3, 3))
        assert (plan.pool, plan.spread) == ("torch", "torch")
        assert "query is on cpu" in plan.reason

    def test_a_broken_triton_is_reported_once(self, monkeypatch):
        availability._tried.cache_clear()
        monkeypatch.setattr(availability, "_try", lambda: "Triton does not work here: it is only a test")
        with pytest.warns(RuntimeWarning, match="only a test; the torch backend serves instead"):
            assert "only a test" in availability._tried()
        assert "only a test" in availability._tried()
        availability._tried.cache_clear()

    def test_the_first_call_may_be_among_fake_tensors(self, monkeypatch):
        """Whether Triton works is found out once, with a kernel that runs."""

        def probe():
            assert torch.zeros(1).item() == 0

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        monkeypatch.setattr("kronattn.ops.triton.blocks.probe", probe)
        with FakeTensorMode():
            assert availability._try() is None
