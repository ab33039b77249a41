"""Bad input: one line each, with the argument, what was given and what is accepted."""

from __future__ import annotations

import pytest
import torch

from kronattn import attention, axis_averages, kronecker_attention, outer_sum
from kronattn.nn import DenseAttention, DenseSegmentationHead, KroneckerAttention

X = torch.randn(2, 4, 5, 6)

BAD = {
    "no grid": (
        lambda: kronecker_attention(torch.randn(2, 4)),
        ValueError,
        r"query .* 1 to 4 axes.*\(2, 4\) has 0",
    ),
    "five axes": (lambda: kronecker_attention(torch.randn(1, 2, *[2] * 5)), ValueError, r"1 to 4 axes.* has 5"),
    "empty axis": (lambda: kronecker_attention(torch.randn(1, 2, 0, 3)), ValueError, "one position on every axis"),
    "no channels": (lambda: kronecker_attention(torch.randn(1, 0, 2, 3)), ValueError, "at least one channel"),
    "heads": (lambda: kronecker_attention(X, num_heads=3), ValueError, "query's channels: 3 does not divide 4"),
    "value heads": (
        lambda: kronecker_attention(X, X, torch.randn(2, 5, 5, 6), num_heads=2),
        ValueError,
        "value's channels: 2 does not divide 5",
    ),
    "zero heads": (lambda: kronecker_attention(X, num_heads=0), ValueError, "num_heads must be at least 1, not 0"),
    "float heads": (
        lambda: kronecker_attention(X, num_heads=2.0),
        TypeError,
        "num_heads must be an int, not float",
    ),
    "mode": (lambda: kronecker_attention(X, mode="qk"), ValueError, "mode must be one of 'kv', 'qkv', not 'qk'"),
    "backend": (
        lambda: kronecker_attention(X, backend="cuda"),
        ValueError,
        "backend must be one of 'auto', .*'cuda'",
    ),
    "attention backend": (lambda: attention(X, backend="flash"), ValueError, "backend must be one of"),
    "batch": (
        lambda: kronecker_attention(X, torch.randn(3, 4, 5, 6)),
        ValueError,
        "key must have query's batch size 2, but has 3",
    ),
    "channels": (
        lambda: kronecker_attention(X, torch.randn(2, 3, 5, 6)),
        ValueError,
        "key must have query's 4 channels, but has 3",
    ),
    "value grid": (
        lambda: kronecker_attention(X, X, torch.randn(2, 4, 6, 5)),
        ValueError,
        r"value must have key's grid \(5, 6\), but has \(6, 5\)",
    ),
    "value alone": (lambda: kronecker_attention(X, None, X), ValueError, "value was given without key"),
    "integers": (lambda: kronecker_attention(X.long()), TypeError, "query must be float16, .*not int64"),
    "complex": (lambda: kronecker_attention(X.cfloat()), TypeError, "query must be float16, .*not complex64"),
    "array": (lambda: kronecker_attention([[1.0]]), TypeError, "query must be a torch.Tensor, not list"),
    "dtypes": (lambda: kronecker_attention(X, X.double()), TypeError, "query is float32, key is float64"),
    "devices": (
        lambda: kronecker_attention(X, X.to("meta")),
        ValueError,
        "key must be on query's device: query is on cpu, key on meta",
    ),
    "scale type": (
        lambda: kronecker_attention(X, scale="1"),
        TypeError,
        "scale must be a float or a tensor, not str",
    ),
    "scale shape": (
        lambda: kronecker_attention(X, num_heads=2, scale=torch.ones(3)),
        ValueError,
        r"1 or num_heads = 2 elements, not of shape \(3,\)",
    ),
    "integer scale tensor": (lambda: kronecker_attention(X, scale=torch.tensor(1)), TypeError, "not int64"),
    "pool": (lambda: attention(X, pool=0), ValueError, "pool must be at least 1, not 0"),
    "pool type": (lambda: attention(X, pool=2.0), TypeError, "pool must be an int, not float"),
    "averages": (lambda: axis_averages(torch.randn(3)), ValueError, "x must be"),
    "tokens": (lambda: outer_sum(torch.randn(1, 2, 5), (2, 2)), ValueError, r"\(N, C, 4\) for the grid \(2, 2\)"),
    "grid": (lambda: outer_sum(torch.randn(1, 2, 5), ()), ValueError, "grid must have 1 to 4 axes"),
    "number for a grid": (
        lambda: outer_sum(torch.randn(1, 2, 30), 30),
        TypeError,
        "^grid must be a sequence of ints, the sizes of its axes, not 30$",
    ),
    "float grid": (lambda: outer_sum(torch.randn(1, 2, 30), (10.0, 20.0)), TypeError, r"ints, .* not \(10.0, 20.0\)$"),
    "name of a dtype": (lambda: axis_averages(X, dtype="float32"), ValueError, "dtype must be one of .* not 'float32'"),
    "integer averages": (lambda: axis_averages(X, dtype=torch.int64), ValueError, "dtype must be .* not torch.int64"),
    "project": (lambda: KroneckerAttention(4, project="vx"), ValueError, "project must name .* not 'vx'"),
    "norm": (
        lambda: KroneckerAttention(4, coefficient_norm="layer"),
        ValueError,
        "coefficient_norm must be one of",
    ),
    "per key": (lambda: KroneckerAttention(4, coefficient_norm="batch_per_key"), ValueError, "needs grid"),
    "layer mode": (lambda: KroneckerAttention(4, mode="q"), ValueError, "mode must be one of"),
    "layer heads": (lambda: DenseAttention(4, num_heads=3), ValueError, "3 does not divide 4"),
    "layer channels": (
        lambda: KroneckerAttention(8)(X),
        ValueError,
        "KroneckerAttention was built for 8 channels, but query has 4",
    ),
    "qk": (lambda: KroneckerAttention(8, qk_channels=4), ValueError, "qk_channels=4 needs maps of q and k"),
    "out": (lambda: DenseAttention(8, out_channels=4, project=""), ValueError, "out_channels=4 needs a map of v"),
    "no maps": (lambda: KroneckerAttention(4, project=None), ValueError, "project must name .* not None"),
    "zero qk": (
        lambda: KroneckerAttention(8, qk_channels=0, project="qkv"),
        ValueError,
        "qk_channels must be at least 1, not 0",
    ),
    "text qk": (lambda: DenseAttention(8, qk_channels="4", project="qkv"), TypeError, "qk_channels must be an int"),
    "negative out": (lambda: DenseAttention(8, out_channels=-4), ValueError, "out_channels must be at least 1, not -4"),
    "float out": (lambda: KroneckerAttention(8, out_channels=2.5), TypeError, "out_channels must be an int, not float"),
    "layer grid": (lambda: KroneckerAttention(8, grid=5), TypeError, "grid must be a sequence of ints, .* not 5$"),
    "text grid": (lambda: KroneckerAttention(8, positions="learned", grid="ab"), TypeError, "grid must be .* not 'ab'"),
    "float places": (lambda: DenseAttention(8, grid=(2.5, 3)), TypeError, r"grid must be .* not \(2.5, 3\)"),
    "negative grid": (
        lambda: KroneckerAttention(8, coefficient_norm="batch_per_key", grid=(-3, -5)),
        ValueError,
        r"grid must have at least one position on every axis, not \(-3, -5\)",
    ),
    "seven axes": (lambda: DenseAttention(8, grid=(3,) * 7), ValueError, "grid must have 1 to 4 axes"),
    "no axes": (lambda: KroneckerAttention(8, grid=()), ValueError, r"grid must have 1 to 4 axes, not \(\)"),
    "dense options": (
        lambda: DenseAttention(8, gate=True),
        TypeError,
        r"^DenseAttention.__init__\(\) got an unexpected keyword argument 'gate'",
    ),
    "head's options": (
        lambda: DenseSegmentationHead(8, 4, rates=3),
        TypeError,
        r"^DenseAttention.__init__\(\) got an unexpected keyword argument 'rates'",
    ),
    "layer pool": (lambda: DenseAttention(8, pool=0), ValueError, "pool must be at least 1, not 0"),
    "float channels": (lambda: DenseAttention(4.0), TypeError, "channels must be an int, not float"),
    "zero channels": (lambda: KroneckerAttention(0), ValueError, "channels must be at least 1, not 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_in_one_line(name):
    call, error, pattern = BAD[name]
    with pytest.raises(error, match=pattern) as caught:
        call()
    assert "\n" not in str(caught.value)
