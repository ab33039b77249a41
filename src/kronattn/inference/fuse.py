"""The inference form of a network: batch norms folded, attention added into convolutions, nothing concatenated."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import fx, nn
from torch.nn.utils import fuse_conv_bn_eval

from kronattn.inference.bottleneck import (
    FusedAttnModule,
    FusedBaseModule,
    FusedBaseSkipModule,
    PortableBaseSkipModule,
)
from kronattn.inference.convolution import fused_conv
from kronattn.nn import AttnModule, AttnSkipModule, BaseModule, BaseSkipModule, ConvNormAct
from kronattn.nn.plain import is_plain
from kronattn.ops.compat import has_hooks

__all__ = ["fuse", "fuse_known", "fuse_unsupported_reason"]

_KNOWN = (BaseModule, BaseSkipModule, AttnModule, AttnSkipModule, ConvNormAct)


def fuse(model: nn.Module, *, attention: bool = True) -> nn.Module:
    """A copy of a trained network for inference on a CPU: the same outputs from fewer operators.

    Batch norms are multiplied into convolutions, the coefficients' norm into the keys, the value map and the last
    convolution into one matrix; BaseSkipModule concatenates nothing; tensors are channels-last inside. Works at any
    size. Its weights are constants under other names: it is not for training, and not for ``load_state_dict``. Layers
    that are not known here, heads of segmentation among them, stay as they are.

    Args:
        model: a network in evaluation mode: ours, or any other with batch norms behind convolutions.
        attention: False leaves attention layers as modules, which ``record_coefficients`` can listen to.

    Example:
        >>> import kronattn
        >>> model = kronattn.create_model("kanet_qkv", num_classes=3, width=0.25).eval()
        >>> x = torch.randn(2, 3, 64, 48)
        >>> torch.allclose(kronattn.fuse(model)(x), model(x), atol=1e-5)
        True
    """
    reason = fuse_unsupported_reason(model)
    if reason is not None:
        raise ValueError(f"{type(model).__name__} cannot be fused: {reason}")
    return fuse_known(model, attention=attention)


def fuse_unsupported_reason(model: nn.Module) -> str | None:
    """Why a network cannot be fused as a whole, in words; None where it can.

    Example:
        >>> fuse_unsupported_reason(nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)))
        'it is in training mode, where batch norms depend on the batch; call eval() first'
    """
    if any(module.training for module in model.modules()):
        return "it is in training mode, where batch norms depend on the batch; call eval() first"
    for name, module in model.named_modules():
        if (reason := _unsupported_reason(module, name)) is not None:
            return reason
    has_norm = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    return None if has_norm else "it has no batch norm to fold"


def fuse_known(model: nn.Module, *, attention: bool = True, portable: bool = False) -> nn.Module:
    """:func:`fuse` as far as it goes: what cannot be folded stays as it is.

    Args:
        model: its copy is set to evaluation mode.
        attention: as in :func:`fuse`.
        portable: convolutions rather than matrix products on channels-last rows, for other runtimes and converters.
    """
    fused = _replaced(copy.deepcopy(model).eval().requires_grad_(False), attention, portable)
    for conv, norm in _pairs(fused):
        _fold_pair(fused, conv, norm)
    return fused


def _replaced(module: nn.Module, attention: bool, portable: bool) -> nn.Module:
    if type(module) in _KNOWN:
        # One that cannot be folded needs its parts as they are: some are called with what to concatenate.
        return module if any(map(_unsupported_reason, module.modules())) else _fused(module, attention, portable)
    for name, child in module.named_children():
        setattr(module, name, _replaced(child, attention, portable))
    return module


def _fused(module: nn.Module, attention: bool, portable: bool) -> nn.Module:
    if isinstance(module, AttnModule):
        return FusedAttnModule(module, attention, portable)
    if isinstance(module, BaseSkipModule) and module.expand is not None:
        return PortableBaseSkipModule(module) if portable else FusedBaseSkipModule(module)
    if isinstance(module, BaseModule):
        return FusedBaseModule(module, portable)
    assert isinstance(module, ConvNormAct)
    return fused_conv(module, portable)


def _unsupported_reason(module: nn.Module, name: str = "") -> str | None:
    """Why a module that folding takes apart must stay whole, in words; None where nothing is lost with it."""
    if isinstance(module, _KNOWN) and has_hooks(module):
        return f"{name or 'it'} has hooks; remove them first"
    if not isinstance(module, ConvNormAct):
        return None
    where = f"{name}." if name else ""
    if not isinstance(module.norm, nn.BatchNorm2d) or module.norm.running_var is None:
        kind = type(module.norm).__name__
        return f"{where}norm is {kind}; only nn.BatchNorm2d with running statistics can be folded"
    for part, plain in (("conv", module.conv), ("norm", module.norm)):
        if not is_plain(plain):
            return f"{where}{part} ({type(plain).__name__}) has hooks or an adapter; remove or merge them first"
    return None


class _Tracer(fx.Tracer):
    """Looks for convolutions and norms of other people's modules; ours have been replaced."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        ours = type(m).__module__.startswith("kronattn.") and not any(
            isinstance(child, nn.BatchNorm2d) for child in m.modules()
        )
        return ours or super().is_leaf_module(m, module_qualified_name)


def _pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of convolutions and of batch norms that follow them and nothing else does, in networks of others."""
    if not any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        return
    try:
        nodes = list(_Tracer().trace(model).nodes)
    except Exception:  # whatever the tracer trips over: the norms then stay where they are
        return
    for node in nodes:
        if node.op != "call_module" or not isinstance(model.get_submodule(str(node.target)), nn.BatchNorm2d):
            continue
        before = node.args[0] if node.args else None
        if isinstance(before, fx.Node) and before.op == "call_module" and len(before.users) == 1:
            used = [each.target for each in nodes if each.target in (before.target, node.target)]
            if len(used) == 2 and _is_pair(model, str(before.target), str(node.target)):
                yield str(before.target), str(node.target)


def _is_pair(model: nn.Module, conv: str, norm: str) -> bool:
    first, second = model.get_submodule(conv), model.get_submodule(norm)
    return is_plain(first, second) and isinstance(first, nn.Conv2d) and getattr(second, "running_var", None) is not None


def _fold_pair(model: nn.Module, conv: str, norm: str) -> None:
    first, second = model.get_submodule(conv), model.get_submodule(norm)
    assert isinstance(first, nn.Conv2d)
    assert isinstance(second, nn.BatchNorm2d)
    folded = fuse_conv_bn_eval(first, second)
    for name, module in ((conv, folded), (norm, nn.Identity())):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
