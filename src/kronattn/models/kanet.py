"""KANet and its ablations: the paper's Table 1 as data, and the networks built from it.

Paper: *Kronecker Attention Networks*, KDD 2020, https://doi.org/10.1145/3394486.3403065. The networks follow timm's
conventions for models (``forward_features``, ``reset_classifier``, ``feature_info``, ...) and need torch alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kronattn.models.drop_path import DropPath
from kronattn.models.inputs import checked_input
from kronattn.models.pooling import GlobalPool
from kronattn.names import near_names
from kronattn.nn import (
    AttnModule,
    AttnSkipModule,
    BaseModule,
    BaseSkipModule,
    ConvNormAct,
    DenseAttention,
    KroneckerAttention,
)
from kronattn.nn.blocks import ReLU6
from kronattn.nn.context_registry import context_builder
from kronattn.ops.checks import check_positive_int

__all__ = ["TABLE_1", "VARIANTS", "KANet", "Row", "Variant", "with_context"]

MINIMUM_SIZE = 32
STEM_CHANNELS = 32
HEAD_CHANNELS = 1280
OUTPUT_STRIDES = (8, 16, 32)


@dataclass(frozen=True)
class Row:
    """One row of Table 1: ``repeats`` modules in a row, of which the first has the stride."""

    attends: bool
    expansion: int
    channels: int
    repeats: int
    stride: int


# The paper's Table 1 between the first convolution (3×3, 32 channels, stride 2) and the last (1×1, 1280 channels):
# whether the module attends (AttnSkipModule) or not (BaseSkipModule), r, c, n, s.
TABLE_1 = (
    Row(False, 1, 16, 1, 1),
    Row(False, 6, 24, 2, 2),
    Row(False, 6, 32, 2, 2),
    Row(True, 6, 32, 1, 1),
    Row(False, 6, 64, 1, 2),
    Row(True, 6, 64, 3, 1),
    Row(True, 6, 96, 3, 1),
    Row(False, 6, 160, 1, 2),
    Row(True, 6, 160, 2, 1),
    Row(True, 6, 320, 1, 1),
)


@dataclass(frozen=True)
class Variant:
    """A network of the paper: what it puts where Table 1 says BaseSkipModule and where it says AttnSkipModule."""

    base: Callable[..., nn.Module]
    attn: Callable[..., nn.Module]


def _attending(module: Callable[..., nn.Module], attention: type[nn.Module], **options: Any) -> Any:
    return partial(module, attn_layer=partial(attention, **options))


VARIANTS = {
    "kanet_kv": Variant(BaseSkipModule, _attending(AttnSkipModule, KroneckerAttention, mode="kv")),
    "kanet_qkv": Variant(BaseSkipModule, _attending(AttnSkipModule, KroneckerAttention, mode="qkv")),
    "kanet_qkv_as_printed": Variant(
        BaseSkipModule, _attending(AttnSkipModule, KroneckerAttention, mode="qkv", mean="each")
    ),
    "attnnet": Variant(BaseSkipModule, _attending(AttnSkipModule, DenseAttention)),
    "attnnet_pool": Variant(BaseSkipModule, _attending(AttnSkipModule, DenseAttention, pool=2)),
    "mobilenetv2": Variant(BaseModule, BaseModule),
    "mobilenetv2_kao": Variant(BaseModule, _attending(AttnModule, KroneckerAttention, mode="kv")),
    "kanet_without_kao": Variant(BaseSkipModule, BaseModule),
}


def with_context(
    variant: str | Variant,
    context: str | Callable[..., nn.Module],
    context_options: Mapping[str, Any] | None = None,
) -> Variant:
    """A network with another layer in the place of its attention.

    Args:
        variant: a name in ``VARIANTS``, or a ``Variant`` of your own whose attending modules take ``attn_layer``.
        context: one of ``kronattn.nn.list_contexts()``, or what builds a layer from its number of channels. "none" is
            the network without attention, BaseModule in its place, as ``kanet_without_kao`` is, which has no skip
            connection there. "identity" keeps the modules, with a layer that adds nothing.
        context_options: the layer's own, such as ``num_heads``.

    Example:
        >>> with_context("kanet_kv", "none") == VARIANTS["kanet_without_kao"]
        True
    """
    modules = _modules_of(variant)
    layer = context_builder(context, **(context_options or {}))
    if "attn_layer" not in getattr(modules.attn, "keywords", {}):
        name = variant if isinstance(variant, str) else "this variant"
        raise ValueError(f"{name} has no attention that context={context!r} could take the place of")
    if context == "none":
        return Variant(modules.base, BaseModule)
    return Variant(modules.base, partial(modules.attn, attn_layer=layer))


def _modules_of(variant: str | Variant) -> Variant:
    if isinstance(variant, Variant):
        return variant
    if not isinstance(variant, str):
        raise TypeError(f"variant must be a name or a Variant, not {type(variant).__name__}")
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}: {near_names(variant, VARIANTS)}")
    return VARIANTS[variant]


class KANet(nn.Module):
    """KANet, or one of the networks that differ from it in their modules alone.

    Args:
        variant: a name in ``VARIANTS``, or a ``Variant`` of your own.
        num_classes: 0 leaves the classifier out.
        in_chans: channels of the image.
        width: multiplies every number of channels (rounded to a multiple of 8).
        drop_rate: of the dropout before the classifier.
        drop_path_rate: how often the last module's residual branch is left out for a sample in training (stochastic
            depth); the rate grows evenly from 0 at the first module, as in timm.
        global_pool: "avg", "max", "avgmax", or "" for none.
        stem_stride: of the first convolution; 1 for small images.
        output_stride: of the last features at most, 8, 16 or 32: strides beyond it become dilation, with the same
            weights. For segmentation.
        context: what takes the place of the variant's attention: one of ``kronattn.nn.list_contexts()``, or what builds
            a layer from its number of channels; the variant's own attention by default.
        context_options: the context layer's own.
        act_layer, norm_layer: build activations and norms.
        table: the rows between the first and the last convolution.

    Shape:
        (N, in_chans, H, W), H and W from 32 up, to (N, num_classes).

    Example:
        >>> model = KANet("kanet_qkv", num_classes=10, width=0.25)
        >>> model(torch.randn(2, 3, 64, 48)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        variant: str | Variant = "kanet_kv",
        *,
        num_classes: int = 1000,
        in_chans: int = 3,
        width: float = 1.0,
        drop_rate: float = 0.2,
        drop_path_rate: float = 0.0,
        global_pool: str = "avg",
        stem_stride: int = 2,
        output_stride: int = 32,
        context: str | Callable[..., nn.Module] | None = None,
        context_options: Mapping[str, Any] | None = None,
        act_layer: Callable[..., nn.Module] = ReLU6,
        norm_layer: Callable[..., nn.Module] = nn.BatchNorm2d,
        table: Sequence[Row] = TABLE_1,
    ) -> None:
        super().__init__()
        check_positive_int("num_classes", num_classes, least=0)
        check_positive_int("in_chans", in_chans)
        if isinstance(width, bool) or not isinstance(width, int | float) or not 0 < width < math.inf:
            raise ValueError(f"width must be a number above 0, not {width!r}")
        if output_stride not in OUTPUT_STRIDES:
            raise ValueError(f"output_stride must be 8, 16 or 32, not {output_stride!r}")
        if not 0 <= drop_path_rate < 1:
            raise ValueError(f"drop_path_rate must be at least 0 and below 1, not {drop_path_rate}")
        if context is not None:
            variant = with_context(variant, context, context_options)
        elif context_options:
            raise ValueError(f"context_options {dict(context_options)} were given without context")
        modules = _modules_of(variant)
        layers: dict[str, Any] = {"act_layer": act_layer, "norm_layer": norm_layer}
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.grad_checkpointing = False

        channels = _scaled(STEM_CHANNELS, width)
        self.stem = ConvNormAct(in_chans, channels, kernel_size=3, stride=stem_stride, **layers)
        self.stages = nn.Sequential()
        self.feature_info: list[dict[str, Any]] = []
        reduction, dilation = stem_stride, 1
        depth, total = 0, sum(row.repeats for row in table)
        for index, row in enumerate(table):
            stage = nn.Sequential()
            dilates = reduction * row.stride > output_stride
            for position in range(row.repeats):
                module = modules.attn if row.attends else modules.base
                out_channels = _scaled(row.channels, width)
                stride = row.stride if position == 0 else 1
                built: Any = module(channels, out_channels, stride=stride, expansion=row.expansion, **layers)
                if dilates or dilation > 1:
                    built.dilate(dilation)
                    # What follows the stride that is no longer taken has to look that much further.
                    dilation *= stride if dilates else 1
                if drop_path_rate and built.skips:
                    # The branch ends with its last norm, whose place for an activation is free.
                    built.project.act = DropPath(drop_path_rate * depth / total)
                depth += 1
                stage.append(built)
                channels = out_channels
            self.stages.append(stage)
            if row.stride > 1 or not self.feature_info:
                reduction *= 1 if dilates else row.stride
                self.feature_info.append({})
            # The last stage at each resolution is the feature that others build on.
            self.feature_info[-1] = {"num_chs": channels, "reduction": reduction, "module": f"stages.{index}"}
        self.num_features = self.head_hidden_size = _scaled(HEAD_CHANNELS, max(1.0, width))
        self.head = ConvNormAct(channels, self.num_features, **layers)
        self.global_pool = GlobalPool(global_pool)
        self.head_drop = nn.Dropout(drop_rate)
        self.classifier = self._new_classifier()
        self.reset_parameters()

    def _new_classifier(self) -> nn.Module:
        return nn.Linear(self.num_features, self.num_classes) if self.num_classes else nn.Identity()

    def reset_parameters(self) -> None:
        """Xavier's initialisation of every convolution and linear map, as in the paper."""
        for module in self.modules():
            _initialise(module)

    def forward_features(self, x: Tensor) -> Tensor:
        """(N, in_chans, H, W) to the last feature map, (N, 1280, ⌈H/32⌉, ⌈W/32⌉) at an output stride of 32."""
        x = self.stem(checked_input(x, self.in_chans, least=MINIMUM_SIZE))
        if self._checkpoints():
            for stage in self.stages:
                x = self._run(stage, x)
        else:
            # As a whole: what wraps or watches the stages is not passed by.
            x = self.stages(x)
        return self.head(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The last feature map to logits or, with ``pre_logits``, to the pooled features."""
        x = self.head_drop(self.global_pool(x))
        return x if pre_logits else self.classifier(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))

    def _checkpoints(self) -> bool:
        return self.grad_checkpointing and torch.is_grad_enabled()

    def _run(self, stage: nn.Module, x: Tensor) -> Tensor:
        if self._checkpoints():
            return checkpoint(stage, x, use_reentrant=False)
        return stage(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Feature maps at the resolutions of ``feature_info``, and the last one unless ``intermediates_only``.

        Args:
            x: (N, in_chans, H, W).
            indices: which of them, or how many of the last; all by default.
            norm: has no effect, every stage ends in a norm.
            stop_early: stop after the last one asked for.
            output_fmt: "NCHW" alone.
            intermediates_only: return the list without the final features.
        """
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt must be 'NCHW', not {output_fmt!r}")
        taken = [self._stage_of(index) for index in self._feature_indices(indices)]
        x = self.stem(checked_input(x, self.in_chans, least=MINIMUM_SIZE))
        features = {}
        for position, stage in enumerate(self.stages):
            if stop_early and position > max(taken):
                break
            x = self._run(stage, x)
            features[position] = x
        intermediates = [features[position] for position in taken]
        return intermediates if intermediates_only else (self.head(x), intermediates)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Remove what is not needed for the intermediate features ``indices``; returns these, counted from 0."""
        kept = self._feature_indices(indices)
        self.stages = self.stages[: max(self._stage_of(index) for index in kept) + 1]
        if prune_head:
            self.head = nn.Identity()  # type: ignore[assignment]
            self.reset_classifier(0, "")
        return kept

    def _feature_indices(self, indices: int | Sequence[int] | None) -> list[int]:
        total = len(self.feature_info)
        if indices is None:
            return list(range(total))
        if isinstance(indices, int):
            if not 1 <= indices <= total:
                raise ValueError(f"the last {indices} features were asked for, but there are {total}")
            return list(range(total - indices, total))
        if not indices:
            raise ValueError("indices must name one feature or more, not none")
        for index in indices:
            if not -total <= index < total:
                raise ValueError(f"feature index {index} is out of range: there are features 0 to {total - 1}")
        return [index % total for index in indices]

    def _stage_of(self, index: int) -> int:
        return int(self.feature_info[index]["module"].split(".")[1])

    def get_classifier(self) -> nn.Module:
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for ``num_classes`` (0: none) and, where given, another global pooling."""
        check_positive_int("num_classes", num_classes, least=0)
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = GlobalPool(global_pool)
        parameter = next(self.parameters())
        self.classifier = self._new_classifier().to(parameter.device, parameter.dtype)
        _initialise(self.classifier)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trade time for memory in training: recompute each stage in the backward pass."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """How parameters form groups from input to output, for layer-wise learning rates."""
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else r"^stages\.(\d+)\.(\d+)"}

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The scales of the coefficients' norm, and positions: decay would flatten the attention."""
        return {name for name, _ in self.named_parameters() if ".attn.norm." in name or ".attn.positions." in name}


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _scaled(channels: int, width: float) -> int:
    """Channels times width, to the nearest multiple of 8, at most a tenth below (MobileNetV2's rule)."""
    scaled = channels * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * scaled else rounded
