"""Depth-wise convolutions with our backward, against PyTorch in float64: in Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton")

from kronattn.nn import BaseModule, convolution
from kronattn.nn.convolution import convolve, depthwise_unsupported_reason
from kronattn.ops.triton.availability import interpreted
from kronattn.ops.triton.depthwise import depthwise_backward, depthwise_conv
from tests.ops.cases import poison_empty, relative_error

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = 1e-2

if not ON_GPU and not interpreted():
    pytest.skip("neither a GPU nor Triton's interpreter", allow_module_level=True)

# One row, one column, one position; more channels and columns than a block has; odd sizes, whose last row and column a
# stride of 2 looks at alone.
SHAPES = [
    (2, 8, 3, 5),
    (1, 24, 4, 4),
    (3, 16, 1, 7),
    (2, 72, 5, 3),
    (5, 8, 4, 1),
    (6, 8, 1, 1),
    (1, 3, 2, 2),
    (7, 40, 6, 9),
]
# Rows in several ranges, and programs with several items.
LARGE = [(8, 32, 56, 56), (16, 144, 28, 28), (128, 96, 80, 80), (64, 960, 7, 7), (2, 40, 111, 63)]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Whatever the launchers allocate comes full of NaN."""
    poison_empty(monkeypatch)


def maps(*shape, seed=0, dtype=torch.bfloat16):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def weights(channels, dtype=torch.float32):
    generator = torch.Generator().manual_seed(9)
    # Values that half precision has, so that nothing is rounded on the way.
    return torch.randn((channels, 1, 3, 3), generator=generator).to(DEVICE, torch.bfloat16).to(dtype)


def exact_gradients(x, weight, d_y, stride):
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    y = F.conv2d(x, weight, None, stride, 1, groups=len(weight))
    return torch.autograd.grad(y, (x, weight), d_y.double())


def half(size, stride):
    return -(-size // stride)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", [*SHAPES, *(LARGE if ON_GPU else [])], ids=str)
def test_gradients(shape, stride):
    batch, channels, height, width = shape
    x, weight = maps(*shape), weights(channels)
    d_y = maps(batch, channels, half(height, stride), half(width, stride), seed=1)
    d_x, d_weight = depthwise_backward(x, weight, d_y, stride)
    exact = exact_gradients(x, weight, d_y, stride)
    assert d_x.is_contiguous(memory_format=torch.channels_last)
    assert d_weight.dtype == weight.dtype
    assert relative_error(d_x, exact[0]) < TOLERANCE
    assert relative_error(d_weight, exact[1]) < 1e-5


@pytest.mark.parametrize("stride", [1, 2])
def test_rows_in_ranges_and_several_items(stride, monkeypatch):
    """What large maps make of the work, on a small one: rows in ranges, and programs that take several items."""
    from kronattn.ops.triton import depthwise, tuning

    x, weight = maps(3, 40, 7, 6), weights(40)
    d_y = maps(3, 40, half(7, stride), half(6, stride), seed=1)
    exact = exact_gradients(x, weight, d_y, stride)
    for per_split in (1, 3):
        splits = half(d_y.shape[2], per_split)
        columns = half(3 * d_y.shape[3], 8)
        cut = tuning.ColumnBlocks(8, 32, 2, splits, per_split, columns * splits, 2, 4)
        monkeypatch.setattr(depthwise, "column_blocks", lambda *sizes, cut=cut: cut)
        for actual, expected in zip(depthwise_backward(x, weight, d_y, stride), exact, strict=True):
            assert relative_error(actual, expected) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_slices_and_other_dtypes(dtype):
    """Maps that are some channels of wider ones are read where they lie; weights may be in half precision."""
    x, d_y = maps(2, 24, 5, 6, dtype=dtype)[:, 8:16], maps(2, 40, 5, 6, seed=1, dtype=dtype)[:, 3:11]
    weight = weights(8, torch.bfloat16).to(dtype)
    d_x, d_weight = depthwise_backward(x, weight, d_y, 1)
    assert (d_x.dtype, d_weight.dtype) == (dtype, dtype)
    for actual, exact in zip((d_x, d_weight), exact_gradients(x, weight, d_y, 1), strict=True):
        assert relative_error(actual, exact) < TOLERANCE


def test_gradients_that_are_not_channels_last():
    x, weight, d_y = maps(2, 8, 5, 6), weights(8), maps(2, 8, 5, 6, seed=1).contiguous()
    for actual, exact in zip(depthwise_backward(x, weight, d_y, 1), exact_gradients(x, weight, d_y, 1), strict=True):
        assert relative_error(actual, exact) < TOLERANCE


def test_same_input_same_bits():
    x, weight, d_y = maps(2, 40, 5, 7), weights(40), maps(2, 40, 5, 7, seed=1)
    first, second = (depthwise_backward(x, weight, d_y, 1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("stride", [1, 2])
def test_autograd(stride):
    x, weight = maps(2, 8, 5, 7).requires_grad_(), weights(8).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        y = depthwise_conv(x, weight, stride)
    assert y.dtype == x.dtype
    assert relative_error(y, F.conv2d(x.double(), weight.double(), None, stride, 1, groups=8)) < TOLERANCE
    d_y = maps(*y.shape, seed=1)
    for actual, exact in zip(
        torch.autograd.grad(y, (x, weight), d_y), exact_gradients(x, weight, d_y, stride), strict=True
    ):
        assert relative_error(actual, exact) < TOLERANCE


def test_gradients_of_gradients():
    x, weight = maps(2, 8, 5, 7).requires_grad_(), weights(8, torch.bfloat16).requires_grad_()
    leaves = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    seconds = []
    for call, inputs in ((depthwise_conv, (x, weight)), (lambda *a: F.conv2d(*a[:2], None, a[2], 1, groups=8), leaves)):
        y = call(*inputs, 2)
        first = torch.autograd.grad(y.double().square().sum(), inputs, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.double().square().sum() for g in first), inputs))
    for actual, exact in zip(*seconds, strict=True):
        assert relative_error(actual, exact, floor=0.1) < 5 * TOLERANCE


def depthwise(channels=8, **options):
    settings = {"kernel_size": 3, "padding": 1, "groups": channels, "bias": False, **options}
    return nn.Conv2d(channels, settings.pop("out_channels", channels), **settings)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_what_is_left_to_pytorch():
    x = maps(32, 8, 48, 48).requires_grad_()
    half_conv = depthwise().to(DEVICE, torch.bfloat16)
    assert depthwise_unsupported_reason(half_conv, x) is None
    assert depthwise_unsupported_reason(depthwise(stride=2).to(DEVICE, torch.bfloat16), x) is None
    unlike = [
        depthwise(bias=True),
        depthwise(kernel_size=5, padding=2),
        depthwise(padding=0),
        depthwise(dilation=2, padding=2),
        depthwise(stride=3),
        depthwise(groups=4),
        depthwise(out_channels=16),
        depthwise(padding_mode="circular"),
    ]
    for conv in unlike:
        assert depthwise_unsupported_reason(conv.to(DEVICE, torch.bfloat16), x) is not None, conv
    for other in (x.float(), x.contiguous(), x[:1], x.detach()):
        assert depthwise_unsupported_reason(half_conv, other) is not None
    # PyTorch refuses weights of another dtype, unless autocast brings them to x's.
    conv = depthwise().to(DEVICE)
    assert depthwise_unsupported_reason(conv, x) is not None
    with torch.autocast("cuda", torch.bfloat16):
        assert depthwise_unsupported_reason(conv, x) is None
        conv.weight.requires_grad_(False)
        assert depthwise_unsupported_reason(conv, x) is not None
    with torch.autocast("cuda", torch.float16):
        assert depthwise_unsupported_reason(conv.requires_grad_(), x) is not None
    conv.register_forward_hook(lambda *call: None)
    with torch.autocast("cuda", torch.bfloat16):
        assert depthwise_unsupported_reason(conv, x) is not None


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_trains_alike_with_and_without(stride, monkeypatch):
    torch.manual_seed(0)
    block = BaseModule(16, 16, stride=stride).to(DEVICE, memory_format=torch.channels_last)
    x = maps(32, 16, 48, 48).requires_grad_()
    found = []
    for reason in (depthwise_unsupported_reason, lambda conv, x: "off"):
        monkeypatch.setattr(convolution, "depthwise_unsupported_reason", reason)
        with torch.autocast("cuda", torch.bfloat16):
            y = block(x)
        found.append(torch.autograd.grad(y.float().square().sum(), [x, *block.parameters()]))
    for ours, theirs in zip(*found, strict=True):
        assert relative_error(ours, theirs, floor=0.1) < 2 * TOLERANCE


def test_modules_are_called_elsewhere():
    conv, x = depthwise(), torch.randn(1, 8, 5, 5)
    assert torch.equal(convolve(conv, x), conv(x))
