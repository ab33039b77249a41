"""Batch norm of the coefficients in closed form, against nn.BatchNorm1d on the materialised matrix."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from kronattn.nn.coefficient_norm import CoefficientNorm
from kronattn.ops.coefficients import coefficient_moments

SHAPES = [(3, 1, 4, 10, 6), (2, 2, 5, 7, 9), (1, 3, 2, 1, 4), (4, 2, 3, 6, 1)]  # N, H, d, m, n


def ordinary_batch_norm(norm: CoefficientNorm) -> nn.BatchNorm1d:
    """An ordinary BatchNorm1d with the same settings and weights."""
    plain = nn.BatchNorm1d(len(norm.weight), eps=norm.eps, momentum=norm.momentum).double()
    with torch.no_grad():
        plain.weight.copy_(norm.weight)
        if norm.bias is not None:
            plain.bias.copy_(norm.bias)
    return plain


def normed_keys(norm: CoefficientNorm, query, key):
    """(N, H, d, n) keys as the norm multiplies them, and the bias."""
    moments = coefficient_moments(query, key, per_key=norm.num_keys is not None) if norm.training else None
    keys, bias = norm(key.flatten(1, 2).transpose(1, 2), moments)
    return keys.transpose(1, 2).unflatten(1, key.shape[1:3]), bias


def closed_form(norm: CoefficientNorm, query, key):
    """Softmax over keys of the normalised coefficients, (N, H, n, m), the closed form's way."""
    keys, bias = normed_keys(norm, query, key)
    logits = keys.transpose(-2, -1) @ query
    if bias is not None:
        logits = logits + bias[..., None]
    return logits.softmax(dim=-2)


def materialised(plain: nn.BatchNorm1d, query, key, per_key: bool):
    matrix = key.transpose(-2, -1) @ query
    samples, heads, keys, queries = matrix.shape
    shape = (samples, heads * keys, queries) if per_key else (samples, heads, keys * queries)
    return plain(matrix.reshape(shape)).reshape(matrix.shape).softmax(dim=-2)


def make(shape, per_key, momentum=0.1, offset=0.0):
    samples, heads, channels, queries, keys = shape
    torch.manual_seed(0)
    norm = CoefficientNorm(heads, num_keys=keys if per_key else None, momentum=momentum).double()
    nn.init.normal_(norm.weight, 1.0, 0.3)
    if norm.bias is not None:
        nn.init.normal_(norm.bias)
    query = torch.randn(samples, heads, channels, queries, dtype=torch.float64) + offset
    key = torch.randn(samples, heads, channels, keys, dtype=torch.float64) + offset
    return norm, query.requires_grad_(), key.requires_grad_()


@pytest.mark.parametrize("per_key", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_equals_batch_norm_of_the_materialised_matrix(shape, per_key, momentum):
    if per_key and shape[0] * shape[3] == 1:
        pytest.skip("one coefficient a key has no variance")
    norm, query, key = make(shape, per_key, momentum)
    plain = ordinary_batch_norm(norm)
    for _ in range(3):  # running statistics accumulate alike
        ours, theirs = closed_form(norm, query, key), materialised(plain, query, key, per_key)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    direction = torch.randn_like(ours)
    parameters = [query, key, norm.weight] + ([norm.bias] if per_key else [])
    plain_parameters = [query, key, plain.weight] + ([plain.bias] if per_key else [])
    ours = torch.autograd.grad((ours * direction).sum(), parameters)
    theirs = torch.autograd.grad((theirs * direction).sum(), plain_parameters)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    torch.testing.assert_close(norm.running_var, plain.running_var, rtol=1e-10, atol=0)
    torch.testing.assert_close(norm.running_mean, plain.running_mean, rtol=1e-10, atol=1e-12)
    assert norm.num_batches_tracked == plain.num_batches_tracked == 3

    norm.eval(), plain.eval()
    before = copy.deepcopy(norm.state_dict())
    torch.testing.assert_close(
        closed_form(norm, query, key), materialised(plain, query, key, per_key), rtol=0, atol=1e-10
    )
    for name, tensor in norm.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} moved in evaluation"


def scale_of(norm, query, key):
    """What the norm multiplies every key by."""
    return normed_keys(norm, query, key)[0].double() / key.double()


def test_large_means_do_not_cancel():
    norm, query, key = make((3, 1, 4, 30, 12), per_key=False, offset=100.0)
    exact = scale_of(norm, query, key)
    single = scale_of(copy.deepcopy(norm).float(), query.float(), key.float())
    torch.testing.assert_close(single, exact, rtol=1e-4, atol=0)


def test_shift_is_not_a_parameter():
    assert [name for name, _ in CoefficientNorm(2).named_parameters()] == ["weight"]
    assert len(list(CoefficientNorm(2, num_keys=5).parameters())) == 2


def test_the_names_are_batch_norm_s():
    assert set(CoefficientNorm(2, num_keys=3).state_dict()) == set(nn.BatchNorm1d(6).state_dict())


def test_synchronised_batch_norms_leave_it_alone():
    norm = nn.Sequential(CoefficientNorm(2), nn.BatchNorm1d(2))
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(norm)
    assert type(converted[0]) is CoefficientNorm
    assert type(converted[1]) is nn.SyncBatchNorm


def test_empty_batch_keeps_statistics():
    norm = CoefficientNorm()
    before = copy.deepcopy(norm.state_dict())
    assert normed_keys(norm, torch.randn(0, 1, 4, 5), torch.randn(0, 1, 4, 6))[0].shape == (0, 1, 4, 6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in norm.state_dict().items())


def test_errors():
    with pytest.raises(ValueError, match="more than one coefficient"):
        normed_keys(CoefficientNorm(), torch.randn(1, 1, 4, 1), torch.randn(1, 1, 4, 1))
    with pytest.raises(ValueError, match="built for 5 keys, but the input has 6"):
        normed_keys(CoefficientNorm(num_keys=5), torch.randn(2, 1, 4, 3), torch.randn(2, 1, 4, 6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 5.0])
@pytest.mark.parametrize("per_key", [False, True])
def test_half_precision_statistics(dtype, offset, per_key):
    """Within the rounding of the inputs' products; large sums stay within float16's range."""
    norm, query, key = make((3, 2, 16, 3000, 12), per_key, offset=offset)
    query, key = (query * 3).to(dtype), key.to(dtype)
    exact = scale_of(norm, query.double(), key.double())
    half = scale_of(copy.deepcopy(norm).float(), query, key)
    torch.testing.assert_close(half, exact, rtol=1e-2, atol=0)
