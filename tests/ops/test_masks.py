"""Masks: a padded batch gives what its samples give by themselves, whatever stands in the padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kronattn import explain_plan, kronecker_attention, pad_batch
from tests.ops.cases import random_cases


@st.composite
def calls(draw: st.DrawFn):
    axes = draw(st.integers(1, 4))
    sizes = st.lists(st.integers(1, (9, 7, 4, 3)[axes - 1]), min_size=axes, max_size=axes)
    mode = draw(st.sampled_from(("kv", "qkv")))
    options = {
        "mode": mode,
        "num_heads": draw(st.sampled_from((1, 2))),
        "scale": draw(st.sampled_from((1.0, 0.3))),
        "mean": draw(st.sampled_from(("once", "each"))),
        "softmax": draw(st.sampled_from(("joint", "per_axis"))),
        "combine": draw(st.sampled_from(("sum", "product"))) if mode == "qkv" and axes > 1 else "sum",
        "backend": draw(st.sampled_from(("torch", "reference"))),
    }
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    grids = draw(st.lists(sizes, min_size=1, max_size=4))
    return [torch.randn(4, *grid, generator=generator, dtype=torch.float64) for grid in grids], options


@given(call=calls())
@random_cases(80)
def test_padded_batches_equal_their_samples(call):
    samples, options = call
    batch, mask = pad_batch(samples)
    y = kronecker_attention(batch.masked_fill(~mask.unsqueeze(1), 7.0), mask=mask, **options)
    assert not y[(~mask).unsqueeze(1).expand_as(y)].any()
    for padded, sample in zip(y, samples, strict=True):
        alone = kronecker_attention(sample[None], **options)[0]
        place = tuple(slice(size) for size in sample.shape[1:])
        torch.testing.assert_close(padded[(slice(None), *place)], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"mode": "qkv"}, {"mode": "qkv", "combine": "product"}], ids=str)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_nothing_at_all(options, backend):
    """An image that is all mask beside one that is not: zeros, finite gradients, and the other as ever."""
    x = torch.randn(2, 4, 5, 6, requires_grad=True)
    mask = torch.ones(2, 5, 6, dtype=torch.bool)
    mask[0] = False
    y = kronecker_attention(x, mask=mask, backend=backend, **options)
    assert not y[0].any()
    torch.testing.assert_close(y[1:], kronecker_attention(x[1:], **options), rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert gradient.isfinite().all()
    assert not gradient[0].any()
    assert gradient[1].any()


def test_what_is_not_there_does_not_matter():
    """Not even if it is no number."""
    x, mask = torch.randn(2, 4, 5, 6), torch.rand(2, 5, 6) < 0.5
    spoiled = x.masked_fill(~mask.unsqueeze(1), float("nan")).requires_grad_()
    for mode in ("kv", "qkv"):
        y = kronecker_attention(spoiled, mode=mode, mask=mask)
        torch.testing.assert_close(y, kronecker_attention(x, mode=mode, mask=mask))
        (gradient,) = torch.autograd.grad(y.sum(), spoiled)
        assert gradient.isfinite().all()


@pytest.mark.parametrize("mode", ["kv", "qkv"])
def test_keys_of_their_own(mode):
    """Both grids have a mask, or one of them."""
    video, text = torch.randn(2, 4, 3, 4, 5).double(), torch.randn(2, 4, 7).double()
    mask, key_mask = torch.rand(2, 3, 4, 5) < 0.7, torch.arange(7).expand(2, 7) < torch.tensor([[7], [4]])
    for masks in ({"mask": mask, "key_mask": key_mask}, {"mask": mask}, {"key_mask": key_mask}):
        y = kronecker_attention(video, text, mode=mode, **masks)
        exact = kronecker_attention(video, text, mode=mode, backend="reference", **masks)
        torch.testing.assert_close(y, exact, rtol=1e-10, atol=1e-10)
    y = kronecker_attention(video[1:], text[1:], mode=mode, key_mask=key_mask[1:])
    torch.testing.assert_close(y, kronecker_attention(video[1:], text[1:, :, :4], mode=mode))


def test_the_plan_says_why():
    plan = explain_plan(torch.randn(1, 4, 3, 3), masked=True)
    assert (plan.pool, plan.spread) == ("torch", "torch")
    with pytest.raises(ValueError, match="backend 'triton' cannot run here: .* a mask's is not$"):
        kronecker_attention(torch.randn(1, 4, 3, 3), mask=torch.ones(1, 3, 3, dtype=torch.bool), backend="triton")


def test_pad_batch():
    samples = [torch.randn(2, 3, 1), torch.randn(2, 1, 4)]
    batch, mask = pad_batch(samples)
    assert batch.shape == (2, 2, 3, 4)
    assert torch.equal(batch[0, :, :3, :1], samples[0])
    assert torch.equal(batch[1, :, :1], samples[1])
    assert mask.sum() == 7
    assert batch.count_nonzero() == 14


def test_gradients_go_through_the_padding():
    samples = [torch.randn(2, 3, 1, requires_grad=True), torch.randn(2, 1, 4)]
    batch, _ = pad_batch([2 * samples[0], samples[1]])
    batch.sum().backward()
    assert torch.equal(samples[0].grad, torch.full((2, 3, 1), 2.0))


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], ValueError, "samples must be one or more tensors, not none"),
        ([[1.0]], TypeError, r"samples\[0\] as a batch of one must be a torch.Tensor, not list"),
        ([torch.ones(2)], ValueError, r"a grid of 1 to 4 axes, but its shape \(1, 2\) has 0"),
        ([torch.ones(2, 3), torch.ones(3, 3)], ValueError, r"same channels: samples\[0\] has 2, samples\[1\] 3$"),
        ([torch.ones(2, 3), torch.ones(2, 3, 3)], ValueError, r"same axes: samples\[0\] has 1, samples\[1\] 2$"),
        ([torch.ones(2, 3), torch.ones(2, 3).double()], ValueError, "same dtype: .* torch.float32, .* torch.float64$"),
    ],
)
def test_bad_samples(samples, error, message):
    with pytest.raises(error, match=message):
        pad_batch(samples)
