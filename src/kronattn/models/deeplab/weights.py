"""A backbone's weights from a file: torchvision's ResNets as they are downloaded, or a network of our own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kronattn.models.deeplab.backbones import Backbone
from kronattn.models.weights import load_weights, read_file

__all__ = ["load_backbone_weights", "read_state_dict"]

# Under which a training run may have put its network's weights among other things.
_INSIDE = ("state_dict", "model", "model_state_dict")
# What wrappers put before a network's own names: DataParallel, Lightning, torch.compile, segmentation networks.
_WRAPPERS = re.compile(r"^(?:module\.|model\.|network\.|_orig_mod\.|backbone\.)+")
_SUFFIXES = (".pth", ".pt", ".ckpt", ".bin", ".safetensors")


def load_backbone_weights(backbone: Backbone, path: str | Path) -> None:
    """Load a backbone's weights from a file, or say in one line why they do not fit; nothing is loaded in part.

    The file may hold a classification network (its classifier is left out), or a segmentation network, of which the
    backbone's part is taken: torchvision's ``deeplabv3_resnet101`` trained on MS-COCO, for instance.

    Args:
        backbone: the ``backbone`` of a :class:`kronattn.models.DeepLabV2`.
        path: a .safetensors file, or a .pth, .pt or .ckpt, of which nothing but tensors is read.

    Example:
        >>> from kronattn.models import DeepLabV2, load_backbone_weights
        >>> model = DeepLabV2("kao_kv", backbone="kanet_kv")
        >>> load_backbone_weights(model.backbone, "no/such/file.pth")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no file no/such/file.pth
    """
    state = _own_part(read_state_dict(path), backbone)
    try:
        load_weights(backbone, state)
    except ValueError as error:
        # load_weights names a class of ours; people know their file.
        raise ValueError(f"{path}: {str(error).replace(type(backbone).__name__, 'the backbone')}") from None


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Read a file of named tensors, without wrappers' prefixes; code inside a pickle is never run.

    Example:
        >>> read_state_dict("weights.onnx")
        Traceback (most recent call last):
        ...
        ValueError: weights.onnx must end in .pth, .pt, .ckpt, .bin or .safetensors
    """
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise ValueError(f"{path} must end in {', '.join(_SUFFIXES[:-1])} or {_SUFFIXES[-1]}")
    return {_WRAPPERS.sub("", key): tensor for key, tensor in _named_tensors(read_file(path)[0], path).items()}


def _named_tensors(found: Any, path: Path) -> dict[str, Tensor]:
    if isinstance(found, Mapping):
        for name in _INSIDE:
            if isinstance(found.get(name), Mapping):
                return _named_tensors(found[name], path)
        tensors = {key: value for key, value in found.items() if isinstance(key, str) and isinstance(value, Tensor)}
        if tensors and len(tensors) == len(found):
            return tensors
    raise ValueError(f"{path} does not hold a state dict: names of weights, each with its tensor")


def _own_part(state: Mapping[str, Tensor], backbone: Backbone) -> dict[str, Tensor]:
    own = backbone.state_dict()
    # Only what is known to belong to a classifier or another network's head is left out: the rest is a mistake.
    beyond = (*backbone.left_out, "head", "classifier", "aux_classifier", "fc")
    return {key: tensor for key, tensor in state.items() if key in own or key.split(".")[0] not in beyond}
