"""The paper's four modules for inference: norms folded, nothing concatenated, attention added into what the last
convolution gives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kronattn.inference.attention import fused_attention
from kronattn.inference.convolution import FusedConv, FusedPointwise, act_or_none, add_into, folded, fused_conv
from kronattn.nn import AttnModule, AttnSkipModule, BaseModule, BaseSkipModule

__all__ = ["FusedAttnModule", "FusedBaseModule", "FusedBaseSkipModule", "PortableBaseSkipModule"]


class FusedBaseModule(nn.Module):
    """A BaseModule; a BaseSkipModule too where it expands nothing, for there is nothing to concatenate then."""

    def __init__(self, module: BaseModule, portable: bool = False) -> None:
        super().__init__()
        self.expand = None if module.expand is None else fused_conv(module.expand, portable)
        self.depthwise = fused_conv(module.depthwise, portable)
        self.project = fused_conv(module.project, portable)
        self.skips = module.skips

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(x if self.expand is None else self.expand(x)))
        return add_into(y, x) if self.skips else y


class FusedBaseSkipModule(nn.Module):
    """A BaseSkipModule without its concatenation, for PyTorch.

    The first convolution copies its input's channels itself, beside the new ones: c·c multiply-adds a position in place
    of a copy of the widest tensor, and as many calls as a BaseModule has.
    """

    def __init__(self, module: BaseSkipModule) -> None:
        super().__init__()
        assert module.expand is not None
        weight, bias = folded(module.expand)
        self.new = len(weight)
        identity = torch.eye(module.in_channels).to(weight)
        weight = torch.cat([weight.flatten(1), identity])
        self.expand = FusedPointwise(weight, torch.cat([bias, torch.zeros_like(identity[0])]))
        self.act = module.expand.act
        self.depthwise = fused_conv(module.depthwise)
        self.project = fused_conv(module.project)
        self.skips = module.skips

    def forward(self, x: Tensor) -> Tensor:
        expanded = self.expand(x)
        new = expanded[:, : self.new]
        activated = self.act(new)
        if expanded.requires_grad:
            # The gradient needs what would be overwritten.
            expanded = torch.cat([activated, expanded[:, self.new :]], dim=1)
        elif activated is not new:
            # The activation did not work in place. A compiler makes this part of the activation; a concatenation it
            # takes for strided copies, which cost as much as the whole network.
            new.copy_(activated)
        y = self.project(self.depthwise(expanded))
        return add_into(y, x) if self.skips else y


class PortableBaseSkipModule(nn.Module):
    """A BaseSkipModule without its concatenation, for other runtimes.

    They fold an activation into the convolution before it, which then must be the same for all channels: so the new
    channels and the input's go through the depth-wise convolution and the projection one by one.
    """

    def __init__(self, module: BaseSkipModule) -> None:
        super().__init__()
        assert module.expand is not None
        self.expand = fused_conv(module.expand, portable=True)
        new = module.expanded - module.in_channels
        weight, bias = folded(module.depthwise)
        conv, act = module.depthwise.conv, module.depthwise.act
        self.depthwise_new = FusedConv(conv, weight[:new], bias[:new], act, portable=True)
        self.depthwise_old = FusedConv(conv, weight[new:], bias[new:], act, portable=True)
        weight, bias = folded(module.project)
        self.project_new = FusedPointwise(weight[:, :new], bias, portable=True)
        self.project_old = FusedPointwise(weight[:, new:], None, portable=True)
        self.act, self.skips = act_or_none(module.project.act), module.skips

    def forward(self, x: Tensor) -> Tensor:
        new = self.project_new(self.depthwise_new(self.expand(x)))
        y = self.project_old(self.depthwise_old(x)) + new
        y = y if self.act is None else self.act(y)
        return x + y if self.skips else y


class FusedAttnModule(nn.Module):
    """An AttnModule or an AttnSkipModule: the last convolution is a sum over the local path, the input and attention.

    The residuals are part of the convolution of the input. A layer that cannot be folded is called as it is.

    Args:
        module: in evaluation mode.
        fold_attention: whether to fold the attention layer at all.
        portable: for other runtimes; see :mod:`kronattn.inference.convolution`.
    """

    def __init__(self, module: AttnModule, fold_attention: bool = True, portable: bool = False) -> None:
        super().__init__()
        self.stride, self.skips = module.stride, module.skips
        self.adds_input = isinstance(module, AttnSkipModule) and module.stride == 1
        weight, bias = folded(module.project)
        weight, new = weight.flatten(1), module.expanded - module.in_channels
        self.expand = None if module.expand is None else fused_conv(module.expand, portable)
        self.depthwise = None if module.depthwise is None else fused_conv(module.depthwise, portable)
        self.project_local = FusedPointwise(weight[:, :new], bias, portable=portable) if new else None
        self.act = act_or_none(module.project.act)
        context = weight[:, new:]
        folds = fold_attention and new > 0 and self.stride == 1
        direct, adds_skip = torch.zeros_like(context), self.skips and self.act is None
        if self.adds_input:
            direct += context
        if adds_skip:
            direct += torch.eye(len(direct)).to(direct)
        attn = fused_attention(module.attn, context, direct, portable) if folds else None
        self.folds_attention = attn is not None
        self.attn = module.attn if attn is None else attn
        self.project_global: FusedPointwise | None = None
        if attn is None:
            self.project_global = FusedPointwise(context, None if new else bias, portable=portable)
        elif adds_skip:
            self.skips = False

    def forward(self, x: Tensor) -> Tensor:
        y = None
        if self.expand is not None and self.depthwise is not None and self.project_local is not None:
            y = self.project_local(self.depthwise(self.expand(x)))
        if self.folds_attention:
            assert y is not None
            y = self.attn(x, y)
        else:
            assert self.project_global is not None
            attended = self.attn(x)
            attended = attended + x if self.adds_input else attended
            if self.stride > 1:
                attended = F.avg_pool2d(attended, self.stride, ceil_mode=True)
            y = self.project_global(attended) if y is None else self.project_global.add_to(y, attended)
        y = y if self.act is None else self.act(y)
        return add_into(y, x) if self.skips else y
