"""Networks: KANet, its ablations, and the networks the paper compares it with."""

from kronattn.models.kanet import KANet
from kronattn.models.registry import create_model, list_models
from kronattn.models.weights import load_mobilenetv2_weights, load_weights

__all__ = ["KANet", "create_model", "list_models", "load_mobilenetv2_weights", "load_weights"]
