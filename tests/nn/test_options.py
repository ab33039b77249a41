"""The layer's options, alone and in any combination, against the reference."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kronattn.ops.plan import override_plan
from kronattn.ops.triton.availability import interpreted
from tests.nn.options import LayerCase, expected, layer_cases
from tests.ops.cases import TOLERANCE, relative_error

# Of the kernels' own tests: sums of a few more terms than the operators'.
KERNELS = 2e-5


def kept_keys(layer, case: LayerCase, dtype: torch.dtype):
    """What dropout multiplies each key's coefficients by, (N, num_heads, S), in the call after the same seed."""
    if layer.dropout is None:
        return None
    torch.manual_seed(case.seed)
    ones = torch.ones(3, sum(case.key_grid or case.grid) * layer.num_heads, 4 // layer.num_heads, dtype=dtype)
    kept = layer.dropout(ones)[..., 0].unflatten(1, (-1, layer.num_heads))
    return kept.transpose(1, 2).double()


def gradients(layer, output, leaves):
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [*leaves, *layer.parameters()]
    found = torch.autograd.grad((output * weights.to(output.dtype)).sum(), wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, wanted, strict=True)]


def check(case: LayerCase, dtype: torch.dtype, tolerance: float, **stages: str) -> None:
    layer = case.layer()
    tensors, masks = case.inputs()
    # Whatever stands where nothing is must not matter.
    for name, xs in (("mask", tensors[:1]), ("key_mask", tensors[1:])):
        for x in xs if name in masks else ():
            x[(~masks[name]).unsqueeze(1).expand_as(x)] = 100.0
    leaves = [x.requires_grad_() for x in tensors]
    exact = expected(layer, leaves, masks, kept_keys(layer, case, dtype))
    if case.residual:
        added = leaves[0] if "mask" not in masks else leaves[0] * masks["mask"].unsqueeze(1)
        exact = exact + added
    exact_gradients = gradients(layer, exact, leaves)

    ours = copy.deepcopy(layer).to(dtype)
    copies = [x.detach().to(dtype).requires_grad_() for x in leaves]
    torch.manual_seed(case.seed)
    with override_plan(**stages):
        y = ours(*copies, residual=copies[0] if case.residual else None, **masks)
    assert relative_error(y, exact, 0.1) <= tolerance
    found = gradients(ours, y, copies)
    floor = max([0.1, *(g.abs().max().item() for g in exact_gradients)])
    for actual, gradient in zip(found, exact_gradients, strict=True):
        assert relative_error(actual, gradient, floor) <= tolerance


def profile(examples: int):
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class TestCombinations:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
    def test_torch(self, dtype):
        @given(case=layer_cases())
        @profile(120)
        def run(case):
            check(case, dtype, TOLERANCE[dtype])

        run()

    @pytest.mark.skipif(not interpreted() and not torch.cuda.is_available(), reason="no GPU and no interpreter")
    def test_triton(self):
        @given(case=layer_cases())
        @profile(12)
        def run(case):
            check(case, torch.float32, KERNELS, pool="triton", spread="triton")

        run()
