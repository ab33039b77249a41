"""The fused kernels against the float64 reference: on a GPU where there is one, in Triton's interpreter elsewhere.

Memory that the launchers allocate is filled with NaN beforehand, so that whatever a kernel leaves out shows.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton")

from kronattn import attention, kronecker_attention
from kronattn.ops import backends, plain, reference
from kronattn.ops.backends import BACKENDS, choose_backend
from kronattn.ops.triton import rules
from tests.ops.cases import lay_out, poison_empty, relative_error

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
MODES = ("kv", "qkv")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}

if not ON_GPU and not rules.interpreted():
    pytest.skip("neither a GPU nor Triton's interpreter", allow_module_level=True)

# batch, channels, height, width, heads
SMALL = [(1, 8, 7, 7, 1), (3, 12, 5, 9, 3), (2, 40, 13, 4, 2), (1, 16, 1, 6, 1), (2, 5, 3, 1, 1)]
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


@pytest.fixture
def paths(monkeypatch):
    """Make the rules choose a path: one program a sample, several kernels, or keys in many blocks."""
    from kronattn.ops.triton import launch

    planners = [x for x in vars(rules).values() if hasattr(x, "cache_clear")]

    def choose(path: str) -> None:
        monkeypatch.setattr(rules, "_FEWEST_SAMPLES", 1)
        monkeypatch.setattr(rules, "_SAMPLE_BYTES", 8192 if path == "sample" else 0)
        monkeypatch.setattr(rules, "_MOST_KEYS", 16 if path == "blocks" else 128)
        forget()

    def forget() -> None:
        launch.forget()
        for planner in planners:
            planner.cache_clear()

    yield choose
    forget()


@pytest.fixture
def automatic(monkeypatch):
    """Let "auto" pick the kernels wherever they can run."""
    eager = dataclasses.replace(BACKENDS["triton"], worth_it=lambda *_: True)
    monkeypatch.setitem(BACKENDS, "triton", eager)
    monkeypatch.setattr(backends, "_AUTOMATIC", ("triton", "torch"))


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
        # A second call takes the launches that the first has written down.
        again = results(tensors, "triton", **options)
        assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


class TestSelfAttention:
    @pytest.mark.parametrize("path", ["sample", "several", "blocks"])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("shape", SMALL, ids=str)
    def test_equals_the_reference(self, shape, mode, path, paths):
        paths(path)
        *sizes, heads = shape
        for layout, dtype in (("channels_last", torch.bfloat16), ("contiguous", torch.float32)):
            check([noise(*sizes, dtype=dtype, layout=layout)], mode=mode, num_heads=heads, scale=0.7)

    @pytest.mark.gpu
    @pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
    @pytest.mark.parametrize("path", ["rules", "sample", "several"])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
    @pytest.mark.parametrize("shape", LARGE, ids=str)
    def test_large(self, shape, mode, dtype, path, paths):
        if path != "rules":
            paths(path)
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


class TestPieces:
    """What the modules are built of: averages, then attention to them with a bias and a skip connection."""

    @pytest.mark.parametrize("grid", [(5, 6), (33, 5), (2, 150), (3, 4, 5)], ids=str)
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_averages(self, grid, layout):
        from kronattn.ops.triton.operators import axis_averages

        x = noise(2, 3, *grid, dtype=torch.bfloat16, layout=layout).requires_grad_()
        tokens = axis_averages(x)
        assert tokens.dtype == torch.float32
        assert relative_error(tokens, reference.axis_averages(x.double())) < 1e-5
        weights = noise(*tokens.shape, seed=1)
        (gradient,) = torch.autograd.grad(tokens, x, weights)
        wide = x.detach().double().requires_grad_()
        (exact,) = torch.autograd.grad(reference.axis_averages(wide), wide, weights.double())
        assert relative_error(gradient, exact) < 1e-2

    @pytest.mark.parametrize("grid", [(5, 6), (9, 65)], ids=str)
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_averages_of_more_channels_than_attention_takes(self, grid, layout, dtype, monkeypatch):
        from kronattn.ops.triton import eager

        kernels = dataclasses.replace(BACKENDS["triton"], worth_it=lambda *_: True)
        monkeypatch.setitem(backends.BACKENDS, "triton", kernels)
        calls = []
        real = eager.averages_forward
        monkeypatch.setattr(eager, "averages_forward", lambda *a, **k: calls.append(a) or real(*a, **k))
        x = noise(2, 1032, *grid, dtype=dtype, layout=layout).requires_grad_()
        chosen = choose_backend("auto", x, x, x)
        assert chosen is BACKENDS["torch"]
        tokens = backends.axis_averages(x, chosen)
        assert len(calls) == 1
        assert tokens.dtype == torch.float32
        assert relative_error(tokens, reference.axis_averages(x.double())) < 1e-5
        weights = noise(*tokens.shape, seed=1)
        (gradient,) = torch.autograd.grad(tokens, x, weights)
        wide = x.detach().double().requires_grad_()
        (exact,) = torch.autograd.grad(reference.axis_averages(wide), wide, weights.double())
        assert relative_error(gradient, exact) < TOLERANCE[dtype]

    def test_averages_in_a_captured_graph_are_the_backend_s(self, monkeypatch):
        kernels = dataclasses.replace(BACKENDS["triton"], worth_it=lambda *_: True)
        monkeypatch.setitem(backends.BACKENDS, "triton", kernels)
        monkeypatch.setattr(backends, "is_captured", lambda: True)
        x = noise(1, 600, 3, 4)
        torch.testing.assert_close(backends.axis_averages(x, BACKENDS["torch"]), plain.axis_averages(x), rtol=0, atol=0)

    @pytest.mark.parametrize("path", ["several", "blocks"])
    @pytest.mark.parametrize("mode", MODES)
    def test_bias_and_skip(self, mode, path, paths):
        from kronattn.ops.triton.operators import attend_averages

        paths(path)
        shapes = {"query": (2, 8, 4, 9), "keys": (2, 8, 21), "values": (2, 6, 21), "key_bias": (2, 21)}
        if mode == "qkv":
            shapes["queries"] = (2, 8, 13)
        leaves = {name: noise(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
        skip = noise(2, 6, 4, 9, seed=9)

        def run(call, dtype, **more):
            inputs = {name: x.to(dtype).requires_grad_() for name, x in leaves.items()}
            y = call(**inputs, num_heads=2, scale=0.6, **more)
            y = y if more else y + skip.to(dtype)
            wanted = [x for name, x in inputs.items() if name != "query" or mode == "kv"]
            return [y, *torch.autograd.grad(y, wanted, noise(*y.shape, seed=5, dtype=dtype))]

        exact = run(plain.attend_averages, torch.float64)
        for actual, expected in zip(run(attend_averages, torch.float32, added=skip), exact, strict=True):
            assert relative_error(actual, expected) < 1e-5

    def test_many_parts_are_added(self, monkeypatch):
        """Strips of rows and tiles of columns, whatever the rules would choose."""
        from kronattn.ops.triton import averages

        plan = rules.AveragesPlan(2, 4, 16, 3, 1, 3, 4, 2, 4, 1)
        monkeypatch.setattr(averages, "averages_plan", lambda *sizes: plan)
        x = noise(2, 5, 10, 11)
        tokens = averages.averages_forward(x, 10, 11, dtype=torch.float32)
        assert relative_error(tokens.transpose(1, 2), reference.axis_averages(x.double())) < 1e-6


class TestLibrary:
    def test_opcheck(self):
        from kronattn.ops.triton import library

        x = noise(2, 8, 3, 5, layout="channels_last").requires_grad_()
        tokens = noise(2, 8, 8).requires_grad_()
        bias = noise(2, 8, seed=2).requires_grad_()
        calls = [
            (library.self_attention, (x, "kv", 2, 0.5)),
            (library.self_attention, (x.detach().contiguous().requires_grad_(), "qkv", 1, 0.5)),
            (library.averages, (x, True)),
            (library.outer_sum, (tokens, [3, 5], True, torch.float32, 1.0, 0.5)),
            (library.attend, (x, tokens, tokens.detach(), bias, x.detach(), 2, 0.5, torch.float32)),
            (library.attend_tokens, (tokens, tokens, tokens, None, None, [3, 5], False, 1, 0.5, torch.float32)),
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
        for mode, queries in (("kv", 30), ("qkv", 11)):
            with FlopCounterMode(display=False) as counted:
                kronecker_attention(x, mode=mode, backend="triton")
            assert counted.get_total_flops() == 2 * 2 * queries * 11 * 2 * 8

    @pytest.mark.parametrize("strict", [False, True])
    def test_export_takes_the_plain_path(self, strict, automatic):
        class Operator(torch.nn.Module):
            def forward(self, x):
                return kronecker_attention(x)

        program = torch.export.export(Operator(), (noise(2, 4, 5, 6),), strict=strict)
        assert "kronattn" not in str(program.graph)

    def test_compile_takes_the_kernels(self, automatic):
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs):
            graphs.append(str(graph.graph))
            return graph

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


class _Kernel:
    """Stands for a compiled kernel: output = x · factor, on the CPU."""

    function = packed_metadata = None
    compiled = 0

    def __getitem__(self, grid):
        def first_launch(x, factor, output, **options):
            self.compiled += 1
            output.copy_(x * factor)
            return self

        return first_launch

    def run(self, a, b, c, stream, function, metadata, description, enter, leave, x, factor, output):
        output.copy_(x * factor)


class TestRecording:
    """Launchers are written down once for each kind of input, and played from then on."""

    @pytest.fixture
    def launcher(self, monkeypatch):
        from kronattn.ops.triton import launch

        monkeypatch.setattr(launch, "_INTERPRETED", False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        kernel = _Kernel()

        @launch.recorded
        def scaled(x, factor, *, extra=None):
            output = launch.empty(x.shape, x.dtype, x.device)
            launch.launch(kernel, (3,), x, factor, output)
            return output, (output + 1 if extra == "unseen" else None)

        return kernel, scaled

    def test_inputs_of_the_same_kind_are_played(self, launcher):
        kernel, scaled = launcher
        for x, factor in ((torch.ones(2, 3), 2.0), (torch.full((2, 3), 3.0), 5.0), (torch.full((2, 3), 4.0), 0.5)):
            torch.testing.assert_close(scaled(x, factor)[0], x * factor)
        assert kernel.compiled == 1
        for x in (torch.ones(4), torch.ones(3, 2).t(), torch.ones(2, 3, dtype=torch.float64)):
            torch.testing.assert_close(scaled(x, 2.0)[0], x * 2)
        assert kernel.compiled == 4

    def test_what_is_not_written_down_runs_in_full(self, launcher):
        kernel, scaled = launcher
        for value in (1.0, 2.0):
            x = torch.full((2, 3), value)
            torch.testing.assert_close(scaled(x, 3.0, extra="unseen")[1], 3 * x + 1)
        assert kernel.compiled == 2


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
        assert "fewer than 2**31 elements" in rules.refuses(x, x, x)

    def test_transforms_take_the_plain_path(self):
        x = noise(3, 2, 4, 3, 3)
        mapped = torch.func.vmap(kronecker_attention)(x)
        torch.testing.assert_close(mapped, torch.stack([kronecker_attention(sample) for sample in x]))

    def test_auto_keeps_cpu_tensors_on_the_torch_backend(self):
        x = torch.randn(1, 2, 3, 3)
        assert choose_backend("auto", x, x, x) is BACKENDS["torch"]

    def test_a_broken_triton_is_reported_once(self, monkeypatch):
        monkeypatch.setattr(rules, "_unavailable", [])
        monkeypatch.setattr(rules, "_find_out", lambda: "Triton does not work here: it is only a test")
        with pytest.warns(RuntimeWarning, match="only a test; the torch backend serves instead"):
            assert "only a test" in rules.unavailable()
        assert "only a test" in rules.unavailable()
