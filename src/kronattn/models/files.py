"""Trained networks as files: weights together with what it takes to use them."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from kronattn.models.registry import MODELS, create_model
from kronattn.models.weights import load_weights

__all__ = ["DESCRIPTION_KEY", "Description", "load_model", "save_model"]

DESCRIPTION_KEY = "kronattn"


@dataclass(frozen=True)
class Description:
    """What a trained network is, and what it wants to see.

    ``model`` and ``options`` are :func:`kronattn.create_model`'s; an image is scaled to ``resize`` × ``resize``, its
    centre of ``size`` × ``size`` taken, and normalised with ``mean`` and ``std`` (of values from 0 to 1).

    Example:
        >>> Description("kanet_kv", {"num_classes": 2}, ["cat", "dog"]).size
        224
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)
    mean: list[float] = field(default_factory=lambda: [0.485, 0.456, 0.406])
    std: list[float] = field(default_factory=lambda: [0.229, 0.224, 0.225])
    resize: int = 256
    size: int = 224
    task: str = "classification"


def save_model(path: str | Path, model: nn.Module, description: Description) -> None:
    """Write a network's weights and description into a safetensors file, whole or not at all."""
    from safetensors.torch import save_file

    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    os.close(handle)
    try:
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, temporary, metadata={DESCRIPTION_KEY: json.dumps(asdict(description))})
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def load_model(source: str | Path) -> tuple[nn.Module, Description]:
    """A trained network in evaluation mode, and its description, from a file or by a packaged network's name."""
    path = Path(source)
    if str(source) in MODELS:
        raise ValueError(f"there are no pretrained weights for {str(source)!r}")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; give a .safetensors file")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            described = (file.metadata() or {}).get(DESCRIPTION_KEY)
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or a broken one ({error})") from None
    if described is None:
        raise ValueError(f"{path} does not say which network it belongs to: it was not written by kronattn")
    known = {entry.name for entry in fields(Description)}
    description = Description(**{name: value for name, value in json.loads(described).items() if name in known})
    model = create_model(description.model, **description.options)
    load_weights(model, state)
    return model.eval(), description
