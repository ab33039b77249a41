"""Weights to start from: our own by name or file, and MobileNetV2's of timm and torchvision."""

from __future__ import annotations

from torch import nn

from kronattn.models.files import find_weights, read_weights
from kronattn.models.weights import load_mobilenetv2_weights

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
    try:
        path = find_weights(source)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"model.weights: {error}") from None
    state, _ = read_weights(path)
    own = network.state_dict()
    if any(name.startswith(_MOBILENETV2) for name in state) and "stem.conv.weight" in own:
        load_mobilenetv2_weights(network, state)
        return
    misfits = [name for name in own if name not in state or state[name].shape != own[name].shape]
    if any(not name.startswith(_CLASSIFIERS) for name in misfits):
        raise ValueError(f"{path} does not fit the network: {misfits[0]} is missing or of another shape")
    network.load_state_dict({name: state[name] for name in own if name not in misfits}, strict=False)
