"""Modules: parameters and state around the operators."""

from kronattn.nn.attention import DenseAttention, KroneckerAttention
from kronattn.nn.blocks import AttnModule, AttnSkipModule, BaseModule, BaseSkipModule, ConvNormAct
from kronattn.nn.coefficient_norm import synchronise_coefficient_norms
from kronattn.nn.recording import record_coefficients

__all__ = [
    "AttnModule",
    "AttnSkipModule",
    "BaseModule",
    "BaseSkipModule",
    "ConvNormAct",
    "DenseAttention",
    "KroneckerAttention",
    "record_coefficients",
    "synchronise_coefficient_norms",
]
