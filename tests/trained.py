"""Small networks that look trained: outputs and attention of ordinary size, without any training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

import kronattn
from kronattn.models.files import Description, save_model
from kronattn.models.kanet import KANet, Row

CLASSES = ["cat", "dog", "fish"]


def settled(model: nn.Module, size: int = 64) -> nn.Module:
    """Give every batch norm statistics that fit what goes through it: with the initial ones, signals die out."""
    torch.manual_seed(1)
    model.train()
    with torch.no_grad():
        for _ in range(12):
            model(torch.randn(4, 3, size, size))
    return model.eval()


def network(name: str = "kanet_kv", **options) -> nn.Module:
    torch.manual_seed(0)
    return settled(kronattn.create_model(name, num_classes=len(CLASSES), width=0.25, **options))


# A module of each kind, before and after; the whole of Table 1 is exported by tools/check_exports.py.
FEW_ROWS = (Row(False, 1, 8, 1, 1), Row(False, 6, 16, 1, 2), Row(True, 6, 16, 1, 1))


def small_network(name: str = "kanet_kv") -> nn.Module:
    """A network with few modules: what is slow is not its arithmetic but how many parts it has."""
    torch.manual_seed(0)
    return settled(KANet(name, num_classes=len(CLASSES), width=0.25, table=FEW_ROWS))


def weights_file(folder: Path, name: str = "kanet_kv") -> Path:
    """A network's file, for images of 64×64."""
    path = folder / f"{name}.safetensors"
    description = Description(name, {"num_classes": 3, "width": 0.25}, CLASSES, resize=72, size=64)
    save_model(path, network(name), description)
    return path


def photo(path: Path, width: int = 90, height: int = 60, seed: int = 0) -> Path:
    """An image file with something on it."""
    values = np.random.default_rng(seed).integers(0, 256, (height // 6, width // 6, 3), dtype=np.uint8)
    Image.fromarray(values).resize((width, height)).save(path)
    return path
