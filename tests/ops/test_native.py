"""The operators of kronattn-cpu: against the float64 reference, in every layout, size and set of instructions."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import kronattn
from kronattn import kronecker_attention
from kronattn.nn import KroneckerAttention
from kronattn.ops import native, torch_backend
from tests.native import native_operators, needs_native
from tests.ops.cases import LAYOUTS, TOLERANCE, lay_out, relative_error

pytestmark = [needs_native, pytest.mark.usefixtures(native_operators.__name__)]

MODES = ("kv", "qkv")
# Whole vectors and tiles of any width, one less, one more, and one alone.
SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 14, 15, 16, 17, 28, 31, 32, 33, 40])


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("mode", MODES)
@given(
    batch=st.integers(0, 3),
    channels=SIZES,
    out=SIZES,
    grid=st.tuples(SIZES, SIZES),
    other=st.none() | st.tuples(SIZES, SIZES),
    layout=st.sampled_from(LAYOUTS),
    scale=st.sampled_from([1.0, 0.125, 4.0]),
    mean=st.sampled_from(["each", "once"]),
    seed=st.integers(0, 99),
)
@example(batch=1, channels=64, out=64, grid=(14, 14), other=None, layout=LAYOUTS[1], scale=1.0, mean="once", seed=0)
def test_equals_the_reference(mode, batch, channels, out, grid, other, layout, scale, mean, seed):
    tensors = [lay_out(noise(batch, channels, *grid, seed=seed), layout)]
    if other is not None:
        tensors += [lay_out(noise(batch, c, *other, seed=seed + i), layout) for i, c in ((1, channels), (2, out))]
    options = {"mode": mode, "scale": scale, "mean": mean}
    found = kronecker_attention(*tensors, **options, backend="native")
    exact = kronecker_attention(*(x.double() for x in tensors), **options, backend="reference")
    assert found.shape == exact.shape
    assert relative_error(found, exact, 0.1) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_keeps_the_layout(layout):
    x = lay_out(noise(2, 5, 6, 7), layout)
    for mode in MODES:
        assert kronecker_attention(x, mode=mode, backend="native").stride() == x.stride()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_large_and_equal_coefficients(layout):
    """A softmax that saturates, one whose weights vanish, and one over keys that are all alike."""
    for x in (100 * noise(1, 8, 9, 11), noise(1, 8, 9, 11).sign() * 30, torch.full((1, 8, 9, 11), 3.0)):
        x = lay_out(x, layout)
        for mode in MODES:
            exact = kronecker_attention(x.double(), mode=mode, backend="reference")
            assert relative_error(kronecker_attention(x, mode=mode, backend="native"), exact) <= 1e-5


def test_what_is_no_number_stays_so():
    x = noise(1, 4, 5, 6)
    x[0, 1, 2, 3] = float("nan")
    for mode in MODES:
        assert kronecker_attention(x, mode=mode, backend="native").isnan().any()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_the_same_bits_whatever_the_threads(layout):
    x = lay_out(noise(3, 70, 40, 50), layout)
    threads = torch.get_num_threads()
    try:
        for mode in MODES:
            found = []
            for count in (1, 2, 2):
                torch.set_num_threads(count)
                found.append(kronecker_attention(x, mode=mode, mean="once", backend="native"))
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[1], found[2])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("narrow", ["avx2", "baseline"])
def test_other_sets_of_instructions(narrow):
    """What other machines would run: a process chooses once, when the operators are loaded."""
    code = """
import torch, kronattn
for layout in (torch.contiguous_format, torch.channels_last):
    for channels, grid in ((7, (5, 9)), (64, (14, 14)), (33, (17, 31))):
        x = torch.randn(2, channels, *grid).contiguous(memory_format=layout)
        for mode in ("kv", "qkv"):
            exact = kronattn.kronecker_attention(x.double(), mode=mode, backend="reference")
            error = kronattn.kronecker_attention(x, mode=mode, backend="native") - exact
            assert error.abs().max() <= 1e-5 * exact.abs().max(), (channels, grid, mode)
"""
    environment = {**os.environ, "KRONATTN_NATIVE": "1", "KRONATTN_NATIVE_SET": narrow}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"positions": "learned"},
        {"coefficient_norm": "cosine"},
        {"coefficient_norm": "sample"},
        {"coefficient_norm": None},
        {"coefficient_norm": "batch_per_key", "grid": (6, 9)},
        {"num_heads": 2, "project": "qkv"},
        {"softmax": "per_axis"},
        {"gate": True},
        {"layer_scale": 0.5},
    ],
    ids=str,
)
def test_layers_agree_with_the_torch_backend(mode, options):
    torch.manual_seed(0)
    layer = KroneckerAttention(8, mode=mode, **options)
    x = noise(2, 8, 6, 9)
    with torch.no_grad():
        layer(x)
        layer.eval()
        assert layer.plan(x).pool == "native"
        mask = torch.ones(2, 6, 9, dtype=torch.bool)
        mask[1, 4:] = False
        masks = [None] if options.get("coefficient_norm") == "batch_per_key" else [None, mask]
        found = [layer(x, residual=x, mask=one) for one in masks]
        native.switch(False)
        assert layer.plan(x).pool == "torch"
        for y, one in zip(found, masks, strict=True):
            torch.testing.assert_close(y, layer(x, residual=x, mask=one), rtol=1e-5, atol=1e-6)


class TestPlan:
    def test_runs_where_nothing_is_trained(self):
        x, layer = noise(1, 4, 5, 6), KroneckerAttention(4).eval()
        assert kronattn.explain_plan(x).spread == "native"
        assert kronattn.explain_plan(x, num_heads=2) == kronattn.explain_plan(x, num_heads=2, mode="qkv")
        assert (kronattn.explain_plan(x, num_heads=2).pool, kronattn.explain_plan(x, num_heads=2).spread) == (
            "native",
            "torch",
        )
        assert kronattn.explain_plan(x, masked=True).spread == "torch"
        # A layer's weights may want gradients.
        assert layer.plan(x).spread == "torch"
        with torch.no_grad():
            assert layer.plan(x).spread == "native"
        for other in (x.double(), x.bfloat16(), x[..., 0], x.clone().requires_grad_()):
            assert kronattn.explain_plan(other).spread == "torch"

    def test_gradients_are_those_of_the_torch_backend(self):
        x, scale = noise(1, 4, 5, 6), torch.tensor(0.5, requires_grad=True)
        kronecker_attention(x, scale=scale).sum().backward()
        assert scale.grad is not None
        layer = KroneckerAttention(4)
        layer(x).sum().backward()
        assert all(parameter.grad is not None for parameter in layer.value_map.parameters())

    def test_transforms_and_counters_see_plain_pytorch(self):
        from torch.utils.flop_counter import FlopCounterMode

        x = noise(3, 2, 4, 5, 6)
        mapped = torch.vmap(lambda one: kronecker_attention(one))(x)
        torch.testing.assert_close(mapped[1], kronecker_attention(x[1]))
        with FlopCounterMode(display=False) as counter:
            kronecker_attention(x[0])
        assert counter.get_total_flops() > 0

    def test_bad_input(self):
        x = noise(1, 4, 5, 6)
        reasons = {
            "it computes in float32, not in float64": {"query": x.double()},
            "it takes grids of two axes, not of 3": {"query": x[:, :, None]},
            "it has no gradients": {"query": x.clone().requires_grad_()},
            "it has one head, one softmax and no masks": {"query": x, "num_heads": 2},
        }
        for reason, arguments in reasons.items():
            with pytest.raises(ValueError, match=f"backend 'native' cannot run here: {reason}"):
                kronecker_attention(**arguments, backend="native")
        native.switch(False)
        with pytest.raises(ValueError, match="KRONATTN_NATIVE=0 switches it off"):
            kronecker_attention(x, backend="native")


class TestOperators:
    def test_what_compilers_are_told(self):
        x = noise(2, 5, 6, 7).contiguous(memory_format=torch.channels_last)
        tokens = noise(2, 13, 5)
        operators = torch.ops.kronattn_cpu
        tests = ("test_schema", "test_faketensor")
        torch.library.opcheck(operators.pool.default, (x, True), test_utils=tests)
        torch.library.opcheck(operators.attend.default, (x, tokens, tokens, None, 0.5, True), test_utils=tests)
        torch.library.opcheck(operators.outer.default, (tokens, x, x.clone(), True, True), test_utils=tests)
        torch.library.opcheck(
            operators.fused_.default,
            (x.clone(), x, noise(5, 5), noise(5, 5), 0.5, False, True),
            test_utils=tests,
        )

    def test_compiled_as_one_graph(self):
        x = noise(1, 16, 7, 9)
        for mode in MODES:
            layer = nn.Sequential(KroneckerAttention(16, mode=mode)).eval()
            with torch.no_grad():
                compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
                torch.testing.assert_close(compiled(x), layer(x))

    def test_what_is_exported_runs_without_them(self):
        layer = KroneckerAttention(8).eval()
        with torch.no_grad():
            program = torch.export.export(layer, (noise(1, 8, 6, 7),))
        assert not any("kronattn_cpu" in str(node.target) for node in program.graph.nodes)

    @pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
    def test_residuals_of_another_layout(self, layout):
        x, keys, values = lay_out(noise(2, 5, 6, 7), layout), noise(2, 4, 5, seed=1), noise(2, 4, 3, seed=2)
        for other in LAYOUTS:
            residual = lay_out(noise(2, 3, 6, 7, seed=3), other)
            expected = torch_backend.spread(x, keys, values, residual=residual)
            torch.testing.assert_close(native.spread(x, keys, values, residual=residual), expected)
            tokens = noise(2, 13, 3, seed=4)
            expected = torch_backend.spread_tokens(tokens, x, residual=residual, mean_once=True)
            found = native.spread_tokens(tokens, x, residual=residual, mean_once=True)
            torch.testing.assert_close(found, expected)


def test_a_build_of_another_version_is_not_used(monkeypatch):
    import kronattn_cpu

    monkeypatch.setattr(kronattn_cpu, "INTERFACE", 0)
    native.switch(True)
    assert native.missing_reason() == "kronattn-cpu is of another version than kronattn: install it again"
    assert kronattn.explain_plan(noise(1, 4, 5, 6)).spread == "torch"
