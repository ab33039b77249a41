"""Modules: parameters and state around the operators."""

from kronattn.nn.attention import DenseAttention, KroneckerAttention
from kronattn.nn.blocks import AttnModule, AttnSkipModule, BaseModule, BaseSkipModule, ConvNormAct
from kronattn.nn.coefficient_norm import synchronise_coefficient_norms
from kronattn.nn.context import AxisMeans, CoordinateGate, GlobalContext, GlobalMean, NoContext, SqueezeAxial
from kronattn.nn.context_registry import build_context, list_contexts
from kronattn.nn.recording import record_coefficients
from kronattn.nn.segmentation import AtrousPyramidHead, DenseSegmentationHead, KroneckerSegmentationHead, resize_scores

__all__ = [
    "AtrousPyramidHead",
    "AttnModule",
    "AttnSkipModule",
    "AxisMeans",
    "BaseModule",
    "BaseSkipModule",
    "ConvNormAct",
    "CoordinateGate",
    "DenseAttention",
    "DenseSegmentationHead",
    "GlobalContext",
    "GlobalMean",
    "KroneckerAttention",
    "KroneckerSegmentationHead",
    "NoContext",
    "SqueezeAxial",
    "build_context",
    "list_contexts",
    "record_coefficients",
    "resize_scores",
    "synchronise_coefficient_norms",
]
