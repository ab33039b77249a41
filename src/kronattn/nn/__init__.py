"""Modules: parameters and state around the operators."""

from kronattn.nn.attention import DenseAttention, KroneckerAttention
from kronattn.nn.coefficient_norm import synchronise_coefficient_norms

__all__ = ["DenseAttention", "KroneckerAttention", "synchronise_coefficient_norms"]
