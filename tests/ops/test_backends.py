"""Every backend against the float64 reference: forward and every gradient, over random cases."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given

from kronattn import attention, kronecker_attention
from kronattn.ops import attend
from kronattn.ops.plan import BACKENDS
from tests.ops.cases import DTYPES, TOLERANCE, Case, cases, relative_error

# Kernels have files of their own: test_triton.py, since they are slow without a GPU, and test_native.py.
TESTED_HERE = ("reference", "torch")

# One value that all positions receive: its gradient is a sum of many terms, which nearly cancel here.
ONE_KEY = Case((2, 3, 4, 4), (1,), 1, 1, 1, None, "qkv", 1.0, "contiguous", 0)
# A head of one channel has no stride that would say how its channels lie.
ONE_CHANNEL = Case((1, 2), None, 1, 2, 1, None, "kv", 1.0, "channels_last", 0)
EMPTY = Case((1, 1), None, 0, 2, 1, None, "qkv", 1.0, "contiguous", 0)


def outputs_and_gradients(operator, tensors, dtype, **options):
    """Gradients of a sum with weights that are numbers of ``dtype``, the same for both sides."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = operator(*leaves, **options)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
        output.device, dtype
    )
    gradients = torch.autograd.grad((output * weights.to(output.dtype)).sum(), leaves)
    return output.detach(), gradients


def compare(operator, case: Case, dtype: torch.dtype, backend: str, **options):
    tensors = case.tensors(dtype)
    options |= {"num_heads": case.heads, "scale": case.scale}
    exact, exact_gradients = outputs_and_gradients(
        operator, [x.double() for x in tensors], dtype, backend="reference", **options
    )
    output, gradients = outputs_and_gradients(operator, tensors, dtype, backend=backend, **options)
    assert output.dtype == dtype
    # A single output may be next to nothing by chance: an average of values whose size is about one.
    assert relative_error(output, exact, 0.1) <= TOLERANCE[dtype]
    # Where keys are all alike or the softmax saturates, large terms cancel and leave next to nothing for queries and
    # keys: errors are measured against the largest gradient of the call.
    floor = max([0.1, *(g.abs().max().item() for g in exact_gradients if g.numel())])
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert gradient.dtype == dtype
        assert relative_error(gradient, exact_gradient, floor) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", TESTED_HERE)
@pytest.mark.parametrize("operator", [kronecker_attention, attention])
@given(case=cases())
@example(case=ONE_KEY)
@example(case=ONE_CHANNEL)
@example(case=EMPTY)
def test_equals_the_reference(operator, backend, dtype, case):
    mean = "once" if case.seed % 2 else "each"
    more = {"mode": case.mode, "mean": mean} if operator is kronecker_attention else {}
    compare(operator, case, dtype, backend, **more)


def test_every_backend_is_tested():
    assert {*TESTED_HERE, "triton", "native"} == set(BACKENDS)


def test_a_single_vector_lies_as_the_fused_kernels_want_it():
    """They check the stride from one vector to the next even where there is no next."""
    one = torch.randn(2, 8, 3, 5)[:, :, 1, 2].unsqueeze(1).unsqueeze(3)
    rows = attend._rows(one)
    assert rows.stride()[-2:] == (8, 1)
    assert torch.equal(rows, one.transpose(-2, -1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
def test_one_position_on_a_gpu(layout):
    # Few channels: the fused backward takes the difference of two sums over them that are equal here.
    x = torch.randn(4, 16, 1, 1).to(memory_format=layout)
    for mode in ("kv", "qkv"):
        (y, gradients), (exact, exact_gradients) = (
            outputs_and_gradients(kronecker_attention, [one], one.dtype, backend="torch", mode=mode)
            for one in (x.cuda(), x.double())
        )
        assert relative_error(y.cpu(), exact) <= TOLERANCE[torch.float32]
        assert relative_error(gradients[0].cpu(), exact_gradients[0], 0.1) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_a_scale_of_another_precision(mode):
    x, scale = torch.randn(2, 8, 5, 6), torch.tensor([0.5, 2.0], dtype=torch.float64)
    y = kronecker_attention(x, mode=mode, num_heads=2, scale=scale, backend="torch")
    torch.testing.assert_close(y, kronecker_attention(x, mode=mode, num_heads=2, scale=scale.float()))


@pytest.mark.parametrize("operator", [kronecker_attention, attention])
def test_autocast_rounds_the_reference_s_input_alone(operator):
    x = 3 * torch.randn(2, 16, 9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        found = operator(x, backend="reference")
    assert torch.equal(found, operator(x.bfloat16(), backend="reference"))


@pytest.mark.parametrize("mode", ["kv", "qkv"])
@pytest.mark.parametrize("in_blocks", [True, False], ids=["blocks", "fused"])
def test_gradients_of_gradients_by_transforms(mode, in_blocks, monkeypatch):
    """On a CPU attention runs in blocks; elsewhere by PyTorch's fused kernels, whose backward has no derivative."""
    monkeypatch.setattr(attend, "_runs_in_blocks", lambda query: in_blocks)
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64)

    def second(name):
        def once(x):
            return kronecker_attention(x, mode=mode, backend=name).square().sum()

        return torch.func.grad(lambda x: torch.func.grad(once)(x).square().sum())(x)

    torch.testing.assert_close(second("torch"), second("reference"))


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_second_derivatives_by_transforms(mode):
    x = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    found, expected = (
        torch.func.hessian(lambda x, name=name: kronecker_attention(x, mode=mode, backend=name).square().sum())(x)
        for name in ("torch", "reference")
    )
    torch.testing.assert_close(found, expected)
