"""Weights to start from: our own by name or file, and MobileNetV2's of timm and torchvision."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from kronattn.models.files import RUN_WEIGHTS, read_weights
from kronattn.models.registry import packaged_names, packaged_weights
from kronattn.models.weights import load_mobilenetv2_weights
from kronattn.names import near_names

__all__ = ["start_from"]

# Where networks keep what depends on the number of classes: ours, timm's, the segmenters'.
_CLASSIFIERS = ("classifier.", "fc.", "head.")
# What the names of MobileNetV2's tensors begin with in torchvision and in timm.
_MOBILENETV2 = ("features.0.0.", "conv_stem.")


def start_from(network: nn.Module, source: str) -> None:
    """Take weights from a file, a run's folder, or by the name of a network that comes with weights.

    Those of a classifier for other classes are left out. A file of timm's or torchvision's MobileNetV2 serves any
    network of Table 1's family, which takes what it shares with it.
    """
    path = packaged_weights(source) if source in packaged_names() else Path(source)
    if not path.exists():
        near = near_names(source, packaged_names())
        raise FileNotFoundError(f"model.weights {source} is neither a file nor a network that comes with any: {near}")
    path = path / RUN_WEIGHTS if path.is_dir() else path
    state, _ = read_weights(path)
    own = network.state_dict()
    if any(name.startswith(_MOBILENETV2) for name in state) and "stem.conv.weight" in own:
        load_mobilenetv2_weights(network, state)
        return
    misfits = [name for name in own if name not in state or state[name].shape != own[name].shape]
    if any(not name.startswith(_CLASSIFIERS) for name in misfits):
        raise ValueError(f"{path} does not fit the network: {misfits[0]} is missing or of another shape")
    network.load_state_dict({name: state[name] for name in own if name not in misfits}, strict=False)
