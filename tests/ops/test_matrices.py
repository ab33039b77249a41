"""Averages and outer sums as products with constant matrices: where they are taken, and that nothing spoils them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from kronattn import kronecker_attention
from kronattn.ops import matrices, reference, torch_backend
from tests.ops.cases import LAYOUTS, lay_out


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(matrices, "_kept", {})


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grid", [(1, 1), (1, 6), (7, 1), (5, 7), (14, 14), (15, 17)])
def test_both_stages_equal_the_reference(grid, layout):
    x, residual = (lay_out(noise(2, 3, *grid) + at, layout).requires_grad_() for at in (0, 1))
    tokens, _ = torch_backend.pool(x)
    torch.testing.assert_close(tokens.transpose(1, 2), reference.axis_averages(x))
    y = torch_backend.spread_tokens(tokens, x, residual=residual, mean_once=True)
    once = torch_backend.count_mean_once(tokens, grid).transpose(1, 2)
    expected = reference.outer_sum(once, grid) + residual
    torch.testing.assert_close(y, expected)
    weights = torch.randn_like(y)
    for found, wanted in zip(
        torch.autograd.grad((y * weights).sum(), (x, residual), retain_graph=True),
        torch.autograd.grad((expected * weights).sum(), (x, residual)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("x", "taken"),
    [
        (torch.randn(1, 2, 16, 16), True),
        (torch.randn(1, 2, 16, 17), False),
        (torch.randn(8, 64, 16, 16), True),
        (torch.randn(9, 64, 16, 16), False),
        (torch.randn(1, 2, 4, 4).bfloat16(), False),
        (torch.randn(1, 2, 4, 4, device="meta"), False),
        (torch.randn(1, 2, 3, 3, 3), False),
    ],
)
def test_where_they_are_taken(x, taken):
    assert (matrices.eager_matrices_of(x) is not None) == taken


def in_a_transform():
    torch.func.vmap(kronecker_attention)(torch.randn(2, 1, 2, 4, 5))
    torch.func.grad(lambda x: kronecker_attention(x).sum())(torch.randn(1, 2, 4, 5))


def among_fake_tensors():
    with FakeTensorMode():
        kronecker_attention(torch.randn(1, 2, 4, 5))


def under_a_counter():
    with FlopCounterMode(display=False):
        kronecker_attention(torch.randn(1, 2, 4, 5))


def in_inference_mode():
    with torch.inference_mode():
        kronecker_attention(torch.randn(1, 2, 4, 5))


def with_another_default_device():
    with torch.device("meta"):
        kronecker_attention(torch.randn(1, 2, 4, 5, device="cpu"))


@pytest.mark.parametrize(
    "first", [in_a_transform, among_fake_tensors, under_a_counter, in_inference_mode, with_another_default_device]
)
def test_the_first_call_may_be_of_any_kind(first):
    """What it leaves behind serves a plain call, gradients included."""
    first()
    x = noise(1, 2, 4, 5).float().requires_grad_()
    weights = noise(1, 2, 4, 5).float() + 1
    gradients = [
        torch.autograd.grad((attend(x, x, x, mode="qkv", mean="once") * weights).sum(), x)[0]
        for attend in (kronecker_attention, reference.kronecker_attention)
    ]
    assert matrices._kept
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("x", [torch.randn(1, 2, 4, 5)])
def test_fake_tensors_leave_nothing_behind(x):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert matrices.matrices_of(mode.from_tensor(x)) is None
    pool, _ = matrices.matrices_of(x)
    assert type(pool) is torch.Tensor
    torch.testing.assert_close(x.flatten(2) @ pool.t(), reference.axis_averages(x))


def test_another_thread_may_clear_them(monkeypatch):
    class Cleared(dict):
        """Empty again as soon as something is in it."""

        def __setitem__(self, key, value):
            pass

    monkeypatch.setattr(matrices, "_kept", Cleared())
    assert matrices.matrices_of(torch.zeros(1, 1, 2, 3))[0].shape == (5, 6)


def test_few_are_kept():
    for size in range(1, 31):
        for other in range(1, 5):
            matrices.eager_matrices_of(torch.zeros(1, 1, size, other))
            assert len(matrices._kept) <= 64
