"""Convolutions as the blocks call them: depth-wise ones are trained by a backward of our own where it is ahead.

A training step of KANet_KV takes 7% less by it (NVIDIA H200, torch 2.11, batch 128, 160×160, bfloat16, channels last).
"""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from kronattn.nn.plain import is_plain
from kronattn.ops.compat import needs_dispatcher, under_transform
from kronattn.ops.fx import is_captured
from kronattn.ops.triton.availability import broken_reason
from kronattn.ops.triton.layout import row_distance

__all__ = ["convolve", "depthwise_unsupported_reason"]

# Elements below which starting kernels of ours takes the host longer than the device saves.
_FEWEST = 2**19
# Offsets are 32-bit integers.
_MOST = 2**30


def convolve(conv: nn.Module, x: Tensor) -> Tensor:
    """conv(x), whatever stands in the convolution's place: an adapter around it, for instance.

    Example:
        >>> convolve(nn.Conv2d(4, 4, 3, padding=1, groups=4), torch.randn(1, 4, 5, 5)).shape
        torch.Size([1, 4, 5, 5])
    """
    symbolic: bool = isinstance(x, fx.Proxy)
    if symbolic or getattr(conv, "groups", 1) == 1 or depthwise_unsupported_reason(conv, x) is not None:
        return conv(x)
    from kronattn.ops.triton.depthwise import depthwise_conv  # needs Triton

    assert isinstance(conv, nn.Conv2d)
    return depthwise_conv(x, conv.weight, conv.stride[0])


def depthwise_unsupported_reason(conv: nn.Module, x: Tensor) -> str | None:
    """Why the kernels do not serve, in words; None where they do.

    >>> depthwise_unsupported_reason(nn.Conv2d(4, 4, 3, padding=1, groups=4), torch.randn(1, 4, 5, 5))
    'they are ahead of PyTorch in half precision on a GPU alone'
    """
    if not x.is_cuda or x.dim() != 4 or x.dtype not in (torch.bfloat16, torch.float16):
        return "they are ahead of PyTorch in half precision on a GPU alone"
    if is_captured() or under_transform() or needs_dispatcher(x):
        return "what is captured, transformed or watched stays PyTorch's own"
    if not _FEWEST <= x.numel() < _MOST:
        return "x must have 2**19 elements or more, and fewer than 2**30"
    distance = row_distance(x)
    if distance is None or x.numel() // x.shape[1] * distance >= _MOST:
        return "x must be channels last"
    if not isinstance(conv, nn.Conv2d) or not is_plain(conv) or conv.bias is not None or conv.padding_mode != "zeros":
        return f"{type(conv).__name__} is no plain nn.Conv2d without a bias"
    return _convolution_reason(conv, x) or broken_reason()


def _convolution_reason(conv: nn.Conv2d, x: Tensor) -> str | None:
    weight = conv.weight
    if not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
        return "they are a backward, of both x and weights"
    if not conv.groups == conv.in_channels == conv.out_channels == x.shape[1]:
        return "each channel must have weights of its own"
    if conv.kernel_size != (3, 3) or conv.padding != (1, 1) or conv.dilation != (1, 1):
        return "weights must be 3×3, side by side, and maps padded by 1"
    if conv.stride not in ((1, 1), (2, 2)):
        return "strides must be 1 or 2"
    if torch.is_autocast_enabled("cuda"):
        # PyTorch would bring both to that dtype.
        fits = torch.get_autocast_dtype("cuda") == x.dtype and weight.dtype in (torch.float32, x.dtype)
    else:
        fits = weight.dtype == x.dtype
    if not fits or weight.device != x.device or not weight.is_contiguous():
        return "weights must be on x's device and of its dtype, or in float32 where autocast would change them"
    return None
