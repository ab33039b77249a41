"""Trained networks as files: weights together with what it takes to use them.

A network's file is a safetensors file whose metadata holds a :class:`Description` as JSON. The checkpoints of a
training run hold the same description, so that either serves wherever a trained network is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kronattn.atomic import replacing
from kronattn.extras import require_library
from kronattn.models.registry import MODELS, create_model, packaged_names, packaged_weights
from kronattn.models.weights import load_weights, open_safetensors, read_file
from kronattn.names import near_names

__all__ = [
    "CHECKPOINT_SUFFIXES",
    "DESCRIPTION_KEY",
    "Description",
    "build_model",
    "find_weights",
    "load_model",
    "read_description",
    "read_weights",
    "save_model",
]

DESCRIPTION_KEY = "kronattn"
# What a training run calls its weights: a run's folder stands for them.
RUN_WEIGHTS = "weights.safetensors"
CHECKPOINT_SUFFIXES = (".safetensors", ".ckpt")
# In a checkpoint the network is a part of what was trained.
_NETWORK = "network."


@dataclass(frozen=True)
class Description:
    """What a trained network is, and what it wants to see.

    ``model`` and ``options`` are :func:`kronattn.create_model`'s; an image is scaled to ``resize`` × ``resize``, its
    centre of ``size`` × ``size`` taken, and normalised with ``mean`` and ``std`` (of values from 0 to 1); with
    ``keep_aspect`` it is the square in its middle that is scaled.
    ``data`` is the kind of dataset that it was trained on. Segmenters take images of any size; their ``ignore_index``
    is the label of pixels that do not count, and ``palette`` has a colour for each class. ``shape`` is a sample's, with
    its channels, where that is no square image; ``fold`` the one that was kept for the test, where there are folds.

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
    data: str = "folder"
    keep_aspect: bool = False
    ignore_index: int = 255
    palette: list[list[int]] = field(default_factory=list)
    shape: list[int] = field(default_factory=list)
    fold: int | None = None

    def some_classes(self, most: int = 20) -> str:
        """The classes by name, as many as a reader may want to see.

        Example:
            >>> Description("kanet_kv", {}, ["cat", "dog", "fish"]).some_classes(2)
            'cat, dog, ...'
        """
        return ", ".join([*self.classes[:most], *(["..."] if len(self.classes) > most else [])])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Description:
        """Read what :meth:`to_dict` gave; what a later version may have added is passed over."""
        if not isinstance(found, Mapping) or "model" not in found:
            raise ValueError("the description of the network has no model")
        known = {entry.name for entry in fields(cls)}
        description = cls(**{name: value for name, value in found.items() if name in known})
        for name, (fits, wanted) in _FIELDS.items():
            if not fits(getattr(description, name)):
                raise ValueError(f"the description's {name} must be {wanted}, not {getattr(description, name)!r:.80}")
        if len(description.mean) != len(description.std):
            raise ValueError("the description's mean and std must have a number for each channel, both")
        return description


def _is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _are_numbers(values: Any, least: float) -> bool:
    # Of pictures, which are of one channel or of three.
    return (
        isinstance(values, list | tuple)
        and len(values) in (1, 3)
        and all(isinstance(value, int | float) and least <= value <= 1e6 for value in values)
    )


def _is_colour(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(_is_whole(part, 0, 255) for part in value)


_SIDE = (lambda value: _is_whole(value, 1, 2**14), "a number of pixels")
# What each entry of a description must be: files come from anywhere.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (lambda value: isinstance(value, str), "a name"),
    "options": (
        lambda value: isinstance(value, dict) and all(isinstance(name, str) for name in value),
        "options by name",
    ),
    "classes": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of names",
    ),
    "mean": (lambda value: _are_numbers(value, -1e6), "numbers, one for each channel"),
    "std": (lambda value: _are_numbers(value, 1e-6), "positive numbers, one for each channel"),
    "resize": _SIDE,
    "size": _SIDE,
    "task": (lambda value: isinstance(value, str), "a name"),
    "data": (lambda value: isinstance(value, str), "a name"),
    "keep_aspect": (lambda value: isinstance(value, bool), "true or false"),
    "ignore_index": (lambda value: _is_whole(value, -(2**31), 2**31), "a label"),
    "palette": (lambda value: isinstance(value, list) and all(map(_is_colour, value)), "a list of colours"),
    "shape": (
        lambda value: isinstance(value, list | tuple) and all(_is_whole(size, 1, 2**14) for size in value),
        "a list of sizes",
    ),
    "fold": (lambda value: value is None or _is_whole(value, 0, 1000), "a number or nothing"),
}
# Options that would have weights read from elsewhere than the file that names them.
_FROM_ELSEWHERE = (
    "backbone_weights", "cache_dir", "checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay",
)  # fmt: skip


def save_model(path: str | Path, model: nn.Module, description: Description, *, half: bool = False) -> None:
    """Write a network's weights and description into a safetensors file, whole or not at all.

    Args:
        path: ends in ``.safetensors``.
        half: matrices and kernels in float16; vectors (norms, biases) stay as they are, since they are few and
            running variances can leave float16's range.

    Example:
        >>> save_model("net.pth", create_model("kanet_kv", width=0.25), Description("kanet_kv", {"width": 0.25}))
        Traceback (most recent call last):
        ...
        ValueError: weights go into a .safetensors file, not net.pth
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"weights go into a .safetensors file, not {path}")
    state = {
        name: (tensor.half() if half and tensor.dim() > 1 else tensor).detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
    }
    library = require_library("safetensors.torch", "a file of weights")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        library.save_file(state, temporary, metadata={DESCRIPTION_KEY: json.dumps(description.to_dict())})


def load_model(source: str | Path) -> tuple[nn.Module, Description]:
    """A trained network in evaluation mode, and its description.

    Args:
        source: a file that :func:`save_model` wrote, a training run's checkpoint (``.ckpt``) or folder, or the name of
            a network whose weights come with the package.

    Example:
        >>> load_model("nowhere.safetensors")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no file nowhere.safetensors
    """
    path = find_weights(source)
    state, description = read_weights(path)
    if description is None:
        raise ValueError(f"{path} does not say which network it belongs to: it was not written by kronattn")
    model = _described(description, path)
    load_weights(
        model, {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    )
    return model.eval(), description


def find_weights(source: str | Path) -> Path:
    """The file of weights that is meant: a file, a run's folder, or the name of a network that comes with weights.

    Example:
        >>> find_weights("kanet_kv").name
        'kanet_kv.safetensors'
    """
    path = packaged_weights(str(source)) if str(source) in MODELS else Path(source)
    if not path.exists() and path.suffix not in CHECKPOINT_SUFFIXES:
        near = near_names(str(source), packaged_names())
        raise FileNotFoundError(f"{source} is neither a file nor a network that comes with weights: {near}")
    return path / RUN_WEIGHTS if (path / RUN_WEIGHTS).exists() else path


def _described(description: Description, path: Path) -> nn.Module:
    """The network that a file says its weights are of. Nothing is read or asked for but that file."""
    name = description.model
    # timm takes names such as hf-hub:SOMEONE/SOMETHING, and looks there.
    if (name not in MODELS and not name.startswith("timm/")) or ":" in name:
        raise ValueError(f"{path} holds weights of {name!r:.80}, which this version does not know")
    options = {option: value for option, value in description.options.items() if option not in _FROM_ELSEWHERE}
    try:
        return build_model(name, options)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} describes a network that cannot be built: {name}, {error}") from None


def build_model(name: str, options: Mapping[str, Any]) -> nn.Module:
    """A registered network or, as ``timm/NAME``, one of timm's."""
    if not name.startswith("timm/"):
        return create_model(name, **options)
    timm = require_library("timm", name)
    try:
        return timm.create_model(name.removeprefix("timm/"), **options)
    except RuntimeError as error:
        if "Unknown model" not in str(error):
            raise
        raise ValueError(f"unknown model {name!r}: timm.list_models() says which there are") from None


def read_weights(path: Path) -> tuple[dict[str, Tensor], Description | None]:
    """The tensors of a safetensors file or of a checkpoint's network, and the description where there is one."""
    content, metadata = read_file(path)
    described = metadata.get(DESCRIPTION_KEY, content.get(DESCRIPTION_KEY))
    tensors = content.get("state_dict", content)
    if isinstance(tensors, Mapping) and any(str(name).startswith(_NETWORK) for name in tensors):
        tensors = {name.removeprefix(_NETWORK): t for name, t in tensors.items() if str(name).startswith(_NETWORK)}
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError(f"{path} holds other things than tensors where a network's weights were expected")
    return dict(tensors), _read_description(described, path) if described else None


def read_description(path: Path) -> Description | None:
    """What a safetensors file says of its weights, which are not read."""
    with open_safetensors(path) as file:
        described = (file.metadata() or {}).get(DESCRIPTION_KEY)
    return _read_description(described, path) if described else None


def _read_description(found: Any, path: Path) -> Description:
    try:
        return Description.from_dict(json.loads(found) if isinstance(found, str) else found)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
