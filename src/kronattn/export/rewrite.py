"""The same network in the operators that other runtimes run best and their converters know: fewer of them, and
convolutions wherever possible.

onnxruntime keeps the channels of convolutions in blocks and folds a sum into the convolution before it. What stands
between two convolutions and is neither costs a change of layout; what is many small operators costs a call for each.
So norms are multiplied into the convolutions, concatenations before a convolution become a sum of two convolutions,
and an attention layer is written with as few operators as it takes. The exporter compares the result with the network
itself, whatever is done here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.nn import AttnModule, AttnSkipModule, BaseSkipModule, ConvNormAct, KroneckerAttention

__all__ = ["rewritten"]


def rewritten(model: nn.Module) -> nn.Module:
    """A copy of a network in evaluation mode that computes the same, for other runtimes and their converters.

    Modules that are not known here stay as they are. Every exported file is of this form; a converter that wants a
    module (``torch.jit.trace`` and pnnx, for instance) gets it from here.

    Example:
        >>> import kronattn
        >>> model = kronattn.create_model("kanet_qkv", num_classes=3, width=0.25).eval()
        >>> x = torch.randn(2, 3, 64, 48)
        >>> torch.allclose(rewritten(model)(x), model(x), atol=1e-5)
        True
    """
    return _replaced(copy.deepcopy(model).eval())


def _replaced(module: nn.Module) -> nn.Module:
    if type(module) is BaseSkipModule and module.expand is not None and _foldable(module.depthwise, module.project):
        return _BaseSkip(module)
    if type(module) in (AttnModule, AttnSkipModule):
        assert isinstance(module, AttnModule)
        if _plain_attention(module.attn):
            module.attn = _Attention(module.attn)  # type: ignore[arg-type]
        if module.depthwise is not None and _foldable(module.project):
            return _Attn(module)
        return module
    for name, child in module.named_children():
        setattr(module, name, _replaced(child))
    return module


def _foldable(*modules: ConvNormAct) -> bool:
    return all(type(module.norm) is nn.BatchNorm2d and module.norm.running_var is not None for module in modules)


def _folded(module: ConvNormAct) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution with its norm multiplied in."""
    norm = module.norm
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_var is not None
    assert norm.running_mean is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    bias = -norm.running_mean * scale
    if norm.bias is not None:
        bias = bias + norm.bias
    return (module.conv.weight * scale.view(-1, 1, 1, 1)).detach(), bias.detach()


class _Conv(nn.Module):
    """A convolution of given weights with another's stride, padding and dilation."""

    def __init__(self, like: nn.Conv2d, weight: Tensor, bias: Tensor | None, *, groups: int = 1) -> None:
        super().__init__()
        # Copies: parts of one tensor would be written together with the whole of it.
        self.weight = nn.Parameter(weight.clone(memory_format=torch.contiguous_format), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)
        self.settings: Any = (like.stride, like.padding, like.dilation, groups)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, *self.settings)


class _BaseSkip(nn.Module):
    """A BaseSkipModule without its concatenation: the new channels and the input's each go their own way."""

    def __init__(self, module: BaseSkipModule) -> None:
        super().__init__()
        assert module.expand is not None
        self.expand, self.act, self.skips = module.expand, module.depthwise.act, module.skips
        count = module.expanded - module.in_channels
        weight, bias = _folded(module.depthwise)
        conv = module.depthwise.conv
        self.depthwise_new = _Conv(conv, weight[:count], bias[:count], groups=count)
        self.depthwise_old = _Conv(conv, weight[count:], bias[count:], groups=module.in_channels)
        weight, bias = _folded(module.project)
        conv = module.project.conv
        self.project_new, self.project_old = _Conv(conv, weight[:, :count], bias), _Conv(conv, weight[:, count:], None)

    def forward(self, x: Tensor) -> Tensor:
        new = self.project_new(self.act(self.depthwise_new(self.expand(x))))
        y = self.project_old(self.act(self.depthwise_old(x))) + new
        return x + y if self.skips else y


class _Attn(nn.Module):
    """An AttnModule or AttnSkipModule whose last convolution is a sum of two, its norm multiplied in."""

    def __init__(self, module: AttnModule) -> None:
        super().__init__()
        assert module.expand is not None
        assert module.depthwise is not None
        self.expand, self.depthwise, self.attn = module.expand, module.depthwise, module.attn
        self.stride, self.skips = module.stride, module.skips
        self.adds_input = isinstance(module, AttnSkipModule) and module.stride == 1
        count = module.expanded - module.in_channels
        weight, bias = _folded(module.project)
        conv = module.project.conv
        self.project_local = _Conv(conv, weight[:, :count], bias)
        self.project_global = _Conv(conv, weight[:, count:], None)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attn(x)
        if self.adds_input:
            attended = attended + x
        if self.stride > 1:
            attended = F.avg_pool2d(attended, self.stride, ceil_mode=True)
        y = self.project_local(self.depthwise(self.expand(x))) + self.project_global(attended)
        return x + y if self.skips else y


def _plain_attention(layer: nn.Module) -> bool:
    """Whether a layer is one that ``_Attention`` knows: one head, at most one scale for all coefficients."""
    return (
        type(layer) is KroneckerAttention
        and layer.num_heads == 1
        and layer.project in ("", "v")
        and layer.coefficient_norm in (None, "batch")
        and not layer.uses_batch_statistics
        and layer.is_linear_in_values
        and layer.softmax == "joint"
        and layer.positions is None
        and layer.layer_scale is None
    )


class _Attention(nn.Module):
    """Kronecker attention over (N, C, h, w), written out."""

    def __init__(self, layer: KroneckerAttention) -> None:
        super().__init__()
        self.mode, self.mean_once = layer.mode, layer.mean == "once"
        scale = layer.scale
        if layer.norm is not None:
            # What the norm multiplies keys by.
            scale = scale * float(layer.norm(torch.ones(1, 1, 1))[0].detach())
        self.scale = scale
        self.value_map = None if layer.value_map is None else nn.Parameter(layer.value_map.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        averages = torch.cat([x.mean(dim=2), x.mean(dim=3)], dim=-1)
        values = averages if self.value_map is None else self.value_map @ averages
        queries = averages if self.mode == "qkv" else x.flatten(2)
        weights = (queries.transpose(1, 2) @ (averages * self.scale)).softmax(dim=-1)
        output = values @ weights.transpose(1, 2)
        if self.mode == "kv":
            return output.view(x.shape)
        width = x.shape[3]
        columns, rows = output[..., :width], output[..., width:]
        if self.mean_once:
            # Both carry the mean: half of each one's goes, and as one vector off the fewer it is one operator less.
            rows = rows - (columns.mean(dim=-1, keepdim=True) + rows.mean(dim=-1, keepdim=True)) * 0.5
        return columns.unsqueeze(2) + rows.unsqueeze(3)
