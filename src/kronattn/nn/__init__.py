"""Modules: parameters and state around the operators."""

from kronattn.nn.attention import DenseAttention, KroneckerAttention
from kronattn.nn.blocks import AttnModule, AttnSkipModule, BaseModule, BaseSkipModule, ConvNormAct
from kronattn.nn.coefficient_norm import synchronise_coefficient_norms
from kronattn.nn.recording import record_coefficients
from kronattn.nn.segmentation import AtrousPyramidHead, DenseSegmentationHead, KroneckerSegmentationHead, resize_scores

__all__ = [
    "AtrousPyramidHead",
    "AttnModule",
    "AttnSkipModule",
    "BaseModule",
    "BaseSkipModule",
    "ConvNormAct",
    "DenseAttention",
    "DenseSegmentationHead",
    "KroneckerAttention",
    "KroneckerSegmentationHead",
    "record_coefficients",
    "resize_scores",
    "synchronise_coefficient_norms",
]
