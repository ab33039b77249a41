"""What the operators promise beyond their values: layouts, transforms, autocast, compilation, determinism."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from kronattn import attention, axis_averages, kronecker_attention, outer_sum
from kronattn.ops import attend as engine
from kronattn.ops import reference, torch_backend
from kronattn.ops.attention import pool_grid
from tests.ops.cases import LAYOUTS, lay_out, relative_error

MODES = ("kv", "qkv")


def noise(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class TestGrid:
    @pytest.mark.parametrize("grid", [(5,), (3, 4), (1, 6), (2, 3, 4), (2, 1, 3, 2)])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_averages_and_outer_sum_equal_the_reference(self, grid, layout):
        x = lay_out(noise(2, 3, *grid, dtype=torch.float64), layout)
        tokens = axis_averages(x)
        torch.testing.assert_close(tokens, reference.axis_averages(x), rtol=0, atol=1e-12)
        torch.testing.assert_close(outer_sum(tokens, grid), reference.outer_sum(tokens, grid), rtol=0, atol=1e-12)

    def test_order_is_columns_then_rows(self):
        x = noise(1, 1, 3, 4)
        tokens = axis_averages(x)[0, 0]
        torch.testing.assert_close(tokens[:4], x[0, 0].mean(0))
        torch.testing.assert_close(tokens[4:], x[0, 0].mean(1))
        y = outer_sum(tokens[None, None], (3, 4))[0, 0]
        assert y[2, 1] == tokens[1] + tokens[4 + 2]

    def test_half_precision_averages_do_not_overflow(self):
        x = torch.full((1, 1, 400, 400), 200.0, dtype=torch.float16)  # the sum of a row is past float16
        torch.testing.assert_close(axis_averages(x), torch.full((1, 1, 800), 200.0, dtype=torch.float16))

    def test_four_axes_pool_like_three(self):
        x = noise(2, 3, 5, 4, 3, 7)
        slices = [pool_grid(x[:, :, i : i + 2].amax(2), 2) for i in (0, 2, 4)]
        torch.testing.assert_close(pool_grid(x, 2), torch.stack(slices, 2))


class TestKronecker:
    def test_one_axis_is_regular_attention(self):
        x = noise(2, 6, 9)
        for mode in MODES:
            torch.testing.assert_close(kronecker_attention(x, mode=mode), attention(x))

    def test_literal_loop(self):
        """Against a computation with no tensor algebra at all: KAO_QKV at one position, term by term."""
        x = noise(1, 2, 3, 4, dtype=torch.float64)
        columns = [[sum(x[0, c, i, j] for i in range(3)) / 3 for c in range(2)] for j in range(4)]
        rows = [[sum(x[0, c, i, j] for j in range(4)) / 4 for c in range(2)] for i in range(3)]
        keys = columns + rows

        def attend(q):
            weights = [torch.exp(sum(a * b for a, b in zip(q, k, strict=True))) for k in keys]
            return [sum(w * k[c] for w, k in zip(weights, keys, strict=True)) / sum(weights) for c in range(2)]

        qkv = kronecker_attention(x, mode="qkv")
        kv = kronecker_attention(x, mode="kv")
        for i in range(3):
            for j in range(4):
                expected = [a + b for a, b in zip(attend(columns[j]), attend(rows[i]), strict=True)]
                torch.testing.assert_close(qkv[0, :, i, j], torch.stack(expected))
                torch.testing.assert_close(kv[0, :, i, j], torch.stack(attend(x[0, :, i, j])))

    @pytest.mark.parametrize("mode", MODES)
    def test_permuting_rows_and_columns_commutes(self, mode):
        x, rows, columns = noise(2, 4, 5, 6), torch.randperm(5), torch.randperm(6)
        permuted = kronecker_attention(x[:, :, rows][..., columns], mode=mode)
        torch.testing.assert_close(permuted, kronecker_attention(x, mode=mode)[:, :, rows][..., columns])

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("grid", [(7, 9), (3, 5, 4)])
    @pytest.mark.parametrize("heads", [1, 2])
    def test_channels_last_stays_channels_last(self, mode, grid, heads):
        x = lay_out(noise(2, 8, *grid), "channels_last")
        assert kronecker_attention(x, mode=mode, num_heads=heads).stride() == x.stride()
        y = x.contiguous()
        assert kronecker_attention(y, mode=mode, num_heads=heads).is_contiguous()

    @pytest.mark.parametrize("backend", ["torch", "reference"])
    def test_tensor_scale(self, backend):
        x = noise(2, 6, 4, 5)
        for mode in MODES:
            same = kronecker_attention(x, mode=mode, num_heads=2, scale=torch.tensor(0.3), backend=backend)
            torch.testing.assert_close(same, kronecker_attention(x, mode=mode, num_heads=2, scale=0.3))
            each = kronecker_attention(x, mode=mode, num_heads=2, scale=torch.tensor([0.3, 2.0]), backend=backend)
            torch.testing.assert_close(each[:, :3], same[:, :3])
            assert not torch.allclose(each[:, 3:], same[:, 3:])

    def test_scale_has_a_gradient(self):
        x = noise(1, 4, 3, 3, dtype=torch.float64)
        for mode in MODES:
            assert gradcheck(
                lambda s, mode=mode: kronecker_attention(x, mode=mode, num_heads=2, scale=s),
                noise(2, dtype=torch.float64).requires_grad_(),
            )

    def test_self_attention_reads_its_input_once(self, monkeypatch):
        """Key and value left out are not averaged again."""
        calls, real = [], torch_backend.pool
        monkeypatch.setattr(torch_backend, "pool", lambda x: calls.append(1) or real(x))
        x = noise(2, 4, 5, 6)
        for mode in MODES:
            calls.clear()
            kronecker_attention(x, mode=mode)
            assert len(calls) == 1

    @pytest.mark.parametrize("axes", [1, 2, 3, 4])
    def test_the_mean_is_counted_once_or_once_for_each_axis(self, axes):
        """A constant grid comes out as it is, or as many times as it has axes; differences stay what they are."""
        x = torch.full((1, 2, *range(2, 2 + axes)), 3.0)
        torch.testing.assert_close(kronecker_attention(x, mode="qkv", mean="once"), x)
        torch.testing.assert_close(kronecker_attention(x, mode="qkv", mean="each"), x * axes)
        x = noise(2, 4, *range(2, 2 + axes))
        each, once = (kronecker_attention(x, mode="qkv", mean=mean) for mean in ("each", "once"))
        positions = tuple(range(2, x.dim()))
        torch.testing.assert_close(once.mean(dim=positions), each.mean(dim=positions) / axes)
        centred = [y - y.mean(dim=positions, keepdim=True) for y in (each, once)]
        torch.testing.assert_close(*centred)

    def test_a_mean_that_there_is_not(self):
        with pytest.raises(ValueError, match="mean must be one of 'each', 'once', not 'twice'"):
            kronecker_attention(noise(1, 2, 3, 3), mode="qkv", mean="twice")

    @pytest.mark.parametrize("mode", MODES)
    def test_large_inputs_do_not_overflow(self, mode):
        for dtype in (torch.float16, torch.float32):
            y = kronecker_attention(noise(2, 8, 5, 6, dtype=dtype) * 100, mode=mode)
            assert torch.isfinite(y).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("blocks", [True, False])
def test_output_may_be_modified_in_place(mode, layout, heads, blocks, monkeypatch):
    """As residual networks do: x = attention(x); x += shortcut. In blocks, and the way that other devices take."""
    monkeypatch.setattr(engine, "_runs_in_blocks", lambda query: blocks)
    x = lay_out(noise(2, 4, 5, 6), layout).requires_grad_()
    y = kronecker_attention(x, mode=mode, num_heads=heads)
    expected = torch.autograd.grad((y + x).square().sum(), x)[0]
    y = kronecker_attention(x, mode=mode, num_heads=heads)
    y += x
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], expected)


class TestBlocks:
    """The CPU's blocks: every way to cut a batch gives the same result."""

    @pytest.mark.parametrize("block", [1, 7, 64, 1000, 10**9])
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_any_block_size(self, block, layout, monkeypatch):
        x = lay_out(noise(3, 6, 4, 5, dtype=torch.float64), layout).requires_grad_()
        exact = kronecker_attention(x, num_heads=2, backend="reference")
        (exact_gradient,) = torch.autograd.grad(exact.square().sum(), x)
        monkeypatch.setattr(engine, "_BLOCK", block)
        output = kronecker_attention(x, num_heads=2)
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        assert relative_error(output, exact) < 1e-12
        assert relative_error(gradient, exact_gradient) < 1e-12

    def test_key_bias(self, monkeypatch):
        query, key, value = (noise(2, 6, n, dtype=torch.float64, seed=n) for n in (9, 5, 5))
        bias = noise(2, 5, dtype=torch.float64, seed=3)
        heads = [x.unflatten(1, (2, 3)) for x in (query, key, value)]
        expected = heads[2] @ (heads[1].transpose(-2, -1) @ heads[0] + bias[..., None]).softmax(dim=-2)

        def attend(*inputs):
            return engine.attend(*inputs, num_heads=2)

        for block in (10, 10**6):
            monkeypatch.setattr(engine, "_BLOCK", block)
            torch.testing.assert_close(attend(query, key, value, bias), expected.flatten(1, 2))
            torch.testing.assert_close(engine._fused(*heads, bias).transpose(-2, -1), expected)
            leaves = [x.clone().requires_grad_() for x in (query, key, value, bias)]
            assert gradcheck(attend, leaves)
            assert gradgradcheck(attend, leaves)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("heads", [1, 2])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_the_way_that_other_devices_take(self, mode, heads, layout, monkeypatch):
        """PyTorch's fused attention around our layouts, run on this device: values and gradients."""
        x = lay_out(noise(3, 4, 5, 6, dtype=torch.float64), layout).requires_grad_()
        key = lay_out(noise(3, 4, 7, dtype=torch.float64, seed=1), layout).requires_grad_()
        exact = kronecker_attention(x, key, mode=mode, num_heads=heads, scale=0.6, backend="reference")
        expected = torch.autograd.grad(exact.square().sum(), (x, key))
        monkeypatch.setattr(engine, "_runs_in_blocks", lambda query: False)
        output = kronecker_attention(x, key, mode=mode, num_heads=heads, scale=0.6)
        torch.testing.assert_close(output, exact)
        for ours, theirs in zip(torch.autograd.grad(output.square().sum(), (x, key)), expected, strict=True):
            torch.testing.assert_close(ours, theirs)

    def test_fused_gradients_equal_ours(self):
        """The path that other devices take, run on this one."""
        inputs = [noise(2, 2, 3, n, dtype=torch.float64, seed=n) for n in (9, 5, 5)] + [None]
        gradient = noise(2, 2, 3, 9, dtype=torch.float64, seed=1)
        ours = engine._gradients(*inputs, gradient)
        fused = engine._fused_gradients(inputs, gradient, (True, True, True, False))
        for a, b in zip(ours[:3], fused[:3], strict=True):
            torch.testing.assert_close(a, b)
        assert fused[3] is None


@pytest.mark.parametrize("backend", ["reference", "torch"])
class TestGradients:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("grid", [(4,), (3, 2), (2, 1, 2)])
    def test_gradients_and_double_gradients(self, backend, mode, grid):
        x = noise(2, 4, *grid, dtype=torch.float64).requires_grad_()

        def call(x):
            return kronecker_attention(x, mode=mode, num_heads=2, scale=0.7, backend=backend)

        assert gradcheck(call, x)
        assert gradgradcheck(call, x)

    def test_generic_attention(self, backend):
        leaves = [
            noise(*shape, dtype=torch.float64, seed=i).requires_grad_()
            for i, shape in enumerate([(2, 4, 3, 2), (2, 4, 5), (2, 6, 5)])
        ]
        for mode in MODES:
            assert gradcheck(lambda *t, mode=mode: kronecker_attention(*t, mode=mode, backend=backend), leaves)
            assert gradgradcheck(lambda *t, mode=mode: kronecker_attention(*t, mode=mode, backend=backend), leaves)

    def test_regular_attention(self, backend):
        x = noise(1, 2, 3, 3, dtype=torch.float64).requires_grad_()
        for pool in (None, 2):
            assert gradcheck(lambda x, pool=pool: attention(x, pool=pool, backend=backend), x)
            assert gradgradcheck(lambda x, pool=pool: attention(x, pool=pool, backend=backend), x)


class TestTransforms:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("heads", [1, 2])
    def test_vmap(self, mode, heads):
        x = noise(3, 2, 4, 5, 6, dtype=torch.float64)

        def call(x):
            return kronecker_attention(x, mode=mode, num_heads=heads)

        expected = torch.stack([call(sample) for sample in x])
        torch.testing.assert_close(torch.func.vmap(call)(x), expected)
        torch.testing.assert_close(torch.func.vmap(call, in_dims=2)(x.movedim(0, 2)), expected)

    @pytest.mark.parametrize("mode", MODES)
    def test_per_sample_gradients(self, mode):
        x = noise(3, 4, 5, 6, dtype=torch.float64)

        def loss(sample):
            return kronecker_attention(sample[None], mode=mode).square().sum()

        gradients = torch.func.vmap(torch.func.grad(loss))(x)
        expected = torch.stack([torch.func.grad(loss)(sample) for sample in x])
        torch.testing.assert_close(gradients, expected)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_compile_without_recompiling(self, mode, layout):
        torch._dynamo.reset()
        compiled = torch.compile(
            lambda x: kronecker_attention(x, mode=mode, num_heads=2),
            fullgraph=True,
            dynamic=True,
            backend="aot_eager",
        )
        with torch._dynamo.config.patch(error_on_recompile=True):
            for shape in [(2, 4, 5, 6), (3, 4, 7, 9), (5, 4, 12, 3)]:
                x = lay_out(noise(*shape), layout).requires_grad_()
                y = x.detach().clone().requires_grad_()
                output, expected = compiled(x), kronecker_attention(y, mode=mode, num_heads=2)
                torch.testing.assert_close(output, expected)
                output.square().sum().backward()
                expected.square().sum().backward()
                torch.testing.assert_close(x.grad, y.grad)

    @pytest.mark.parametrize("mode", MODES)
    def test_inductor(self, mode):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: kronecker_attention(x, mode=mode), fullgraph=True)
        x = noise(2, 4, 5, 6)
        torch.testing.assert_close(compiled(x), kronecker_attention(x, mode=mode))

    @pytest.mark.parametrize("mode", MODES)
    def test_export_with_dynamic_sizes(self, mode):
        class Operator(torch.nn.Module):
            def forward(self, x):
                return kronecker_attention(x, mode=mode)

        sizes = {axis: torch.export.Dim(name, min=2, max=64) for axis, name in ((0, "n"), (2, "h"), (3, "w"))}
        program = torch.export.export(Operator(), (noise(2, 4, 5, 6),), dynamic_shapes=(sizes,))
        x = noise(3, 4, 8, 7)
        torch.testing.assert_close(program.module()(x), kronecker_attention(x, mode=mode))

    @pytest.mark.parametrize("mode", MODES)
    def test_jit_trace(self, mode):
        x = noise(2, 4, 5, 6)
        traced = torch.jit.trace(lambda x: kronecker_attention(x, mode=mode), (x,))
        torch.testing.assert_close(traced(x + 1), kronecker_attention(x + 1, mode=mode))


class TestAutocast:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_output_has_autocast_dtype(self, mode, dtype):
        x = noise(2, 8, 7, 9).requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = kronecker_attention(x, mode=mode)
            assert attention(x).dtype == dtype == F.scaled_dot_product_attention(x, x, x).dtype
        assert y.dtype == dtype
        expected = kronecker_attention(x.to(dtype), mode=mode)
        torch.testing.assert_close(y, expected)
        y.float().sum().backward()
        assert x.grad.dtype == torch.float32

    def test_mixed_dtypes_meet_in_autocast(self):
        q, k = noise(2, 8, 4, 4), noise(2, 8, 3, 3, dtype=torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert kronecker_attention(q, k).dtype == torch.bfloat16
        with pytest.raises(TypeError, match="key must have query's dtype: query is float32, key is bfloat16"):
            kronecker_attention(q, k)

    def test_double_is_left_alone(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert kronecker_attention(noise(1, 2, 3, 3, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_input_same_bits(mode, dtype):
    x = noise(4, 16, 15, 17, dtype=dtype).requires_grad_()

    def run():
        y = kronecker_attention(x, mode=mode, num_heads=2)
        return y, torch.autograd.grad(y.float().square().sum(), x)[0]

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_coefficients_are_never_built_for_a_large_map(mode):
    """A 512×512 map: its coefficients would take 8.6 GB in mode kv."""
    x = noise(1, 8, 512, 512).requires_grad_()
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(output):
                if isinstance(tensor, torch.Tensor):
                    sizes.append(tensor.numel())
            return output

    with Watch():
        kronecker_attention(x, mode=mode).sum().backward()
    assert max(sizes) <= x.numel()
