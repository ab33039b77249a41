"""DeepLabV2 with the paper's heads (section 4.6), on torchvision's ResNets or on a KANet."""

from kronattn.models.deeplab.backbones import BACKBONES
from kronattn.models.deeplab.context_head import ContextHead
from kronattn.models.deeplab.network import HEADS, SEGMENTERS, DeepLabV2
from kronattn.models.deeplab.weights import load_backbone_weights

__all__ = ["BACKBONES", "HEADS", "SEGMENTERS", "ContextHead", "DeepLabV2", "load_backbone_weights"]
