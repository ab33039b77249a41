"""Networks: KANet, its ablations, the networks the paper compares it with, and DeepLabV2 for segmentation."""

from kronattn.models.deeplab import DeepLabV2, load_backbone_weights
from kronattn.models.kanet import KANet
from kronattn.models.registry import create_model, list_models, task_of
from kronattn.models.weights import load_mobilenetv2_weights, load_weights

__all__ = [
    "DeepLabV2",
    "KANet",
    "create_model",
    "list_models",
    "load_backbone_weights",
    "load_mobilenetv2_weights",
    "load_weights",
    "task_of",
]
