"""Weights from elsewhere: files and state dicts that must fit, and MobileNetV2's as a start for its relatives."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronattn.extras import require_library
from kronattn.ops.checks import check_positive_int

__all__ = [
    "Transfer",
    "adapt_first_convolution",
    "load_mobilenetv2_weights",
    "load_weights",
    "open_safetensors",
    "read_file",
    "unpack",
]


def unpack(path: Path) -> dict[str, Any]:
    """What a PyTorch file holds, if that is tensors and plain values; a file with pickled code is refused."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{path} is no checkpoint of tensors and plain values, so it is not loaded") from None
    except (FileNotFoundError, PermissionError):
        raise
    except (RuntimeError, EOFError, ValueError, KeyError, IndexError, OSError):
        # torch looks for the end of a file that is cut short at places that no file has, which is an OSError.
        raise ValueError(f"{path} is not a PyTorch file, or a broken one") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__} where a dictionary of tensors was expected")
    return found


def read_file(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The one place where files of weights are read: what a .safetensors file or PyTorch's holds, and its metadata.

    Nothing but tensors and plain values is read: code inside a pickle is never run.

    Example:
        >>> read_file("no/such/file.pth")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no file no/such/file.pth
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder, not a file of weights; give a .safetensors or .ckpt file")
    if path.suffix.lower() != ".safetensors":
        return unpack(path), {}
    with open_safetensors(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """The file as the safetensors library opens it, for those who want a part of it; a broken one is one line."""
    library = require_library("safetensors", f"reading {path.name}")
    try:
        with library.safe_open(path, framework="pt") as file:
            yield file
    except library.SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or a broken one ({error})") from None


def load_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict that must fit exactly; what does not fit is named in one line, and nothing is loaded.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> load_weights(model, {"weight": torch.zeros(3, 2)})
        Traceback (most recent call last):
        ...
        ValueError: the weights do not fit Linear: missing bias
    """
    own = model.state_dict()
    problems = []
    missing = [key for key in own if key not in state]
    unknown = [key for key in state if key not in own]
    other = [
        f"{key} is {tuple(state[key].shape)} and should be {tuple(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    for what, keys in (("missing", missing), ("unknown", unknown), ("of another shape:", other)):
        if keys:
            problems.append(f"{what} {_some(keys)}")
    if problems:
        raise ValueError(f"the weights do not fit {type(model).__name__}: {'; '.join(problems)}")
    model.load_state_dict(dict(state))


def adapt_first_convolution(weight: Tensor, channels: int) -> Tensor:
    """A first convolution's weights for images with another number of channels, as timm adapts them.

    Args:
        weight: (C, 3, k, k), for red, green and blue.
        channels: of the image. One gets the sum over the colours; more get the colours again and again, scaled so that
            outputs keep their size.

    Returns:
        (C, channels, k, k).

    Example:
        >>> adapt_first_convolution(torch.ones(8, 3, 3, 3), 1)[0, 0, 0]
        tensor([3., 3., 3.])
    """
    check_positive_int("channels", channels)
    if channels == 3:
        return weight
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    repeats = -(-channels // 3)
    return weight.repeat(1, repeats, 1, 1)[:, :channels] * (3 / channels)


@dataclass
class Transfer:
    """What a network took from another's weights.

    ``taken``: whole tensors; ``in_part``: the leading part of a larger tensor, where the network has fewer channels;
    ``left``: the network's own tensors that kept their initial values.
    """

    taken: list[str] = field(default_factory=list)
    in_part: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{len(self.taken)} tensors taken, {len(self.in_part)} in part ({_some(self.in_part)}), "
            f"{len(self.left)} left as they were ({_some(self.left)})"
        )


def load_mobilenetv2_weights(model: nn.Module, state: Mapping[str, Tensor]) -> Transfer:
    """Start a network of Table 1's family from a MobileNetV2's weights: torchvision's, timm's or our own.

    ``mobilenetv2`` itself takes everything and computes what the original does. The others take each tensor that
    they share and, where their first convolutions make fewer channels, the leading part of it; what the attention
    adds keeps its initial values. The classifier is taken where the number of classes is the same.

    Args:
        model: a :class:`kronattn.models.KANet` of any variant, of the same width.
        state: MobileNetV2's state dict.

    Returns:
        A :class:`Transfer` that lists what was taken and what was not.

    Example:
        >>> from kronattn.models import create_model
        >>> start = create_model("mobilenetv2", num_classes=10).state_dict()
        >>> transfer = load_mobilenetv2_weights(create_model("kanet_kv", num_classes=10), start)
        >>> len(transfer.taken), len(transfer.in_part), "stages.3.0.attn.value_map.weight" in transfer.left
        (184, 130, True)
    """
    given = _our_names(state)
    own = model.state_dict()
    unknown = [key for key in given if key not in own and ".expand." not in key and ".depthwise." not in key]
    if unknown or "stem.conv.weight" not in given:
        raise ValueError(f"the weights are not a MobileNetV2's as in torchvision, timm or kronattn: {_some(unknown)}")
    transfer = Transfer()
    new = {}
    for key, tensor in own.items():
        source = given.get(key)
        if source is None or source.dim() != tensor.dim():
            transfer.left.append(key)
        elif source.shape == tensor.shape:
            new[key] = source
            transfer.taken.append(key)
        elif key.startswith("stages.") and all(s >= t for s, t in zip(source.shape, tensor.shape, strict=True)):
            new[key] = source[tuple(slice(size) for size in tensor.shape)]
            transfer.in_part.append(key)
        elif key.startswith("classifier."):
            transfer.left.append(key)
        else:
            raise ValueError(
                f"{key} is {tuple(source.shape)} in the weights and {tuple(tensor.shape)} in the network: "
                f"use the same width and in_chans"
            )
    model.load_state_dict(new, strict=False)
    return transfer


def _our_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if any(key.startswith("features.") for key in state):
        rules, places = _TORCHVISION, {str(index + 1): ours for index, ours in enumerate(_positions(_REPEATS_OURS))}
    elif any(key.startswith("blocks.") for key in state):
        rules, places = _TIMM, dict(zip(_positions(_REPEATS_TIMM), _positions(_REPEATS_OURS), strict=True))
    else:
        return dict(state)
    return {_rename(key, rules, places): tensor for key, tensor in state.items()}


# Where each of the 17 modules stands: torchvision counts them through, timm has seven stages, Table 1 ten rows.
_REPEATS_OURS = (1, 2, 2, 1, 1, 3, 3, 1, 2, 1)
_REPEATS_TIMM = (1, 2, 3, 4, 3, 3, 1)


def _positions(repeats: tuple[int, ...]) -> list[str]:
    return [f"{stage}.{block}" for stage, blocks in enumerate(repeats) for block in range(blocks)]


# (their convolution, their norm, ours); a group is a module's place, which takes the place of @ in ours once it is
# translated by the tables above. The first module has no expansion.
_Rules = tuple[tuple[str, str, str], ...]
_TORCHVISION: _Rules = (
    (r"features\.0\.0", r"features\.0\.1", "stem"),
    (r"features\.(1)\.conv\.0\.0", r"features\.(1)\.conv\.0\.1", "stages.@.depthwise"),
    (r"features\.(1)\.conv\.1", r"features\.(1)\.conv\.2", "stages.@.project"),
    (r"features\.18\.0", r"features\.18\.1", "head"),
    (r"features\.(\d+)\.conv\.0\.0", r"features\.(\d+)\.conv\.0\.1", "stages.@.expand"),
    (r"features\.(\d+)\.conv\.1\.0", r"features\.(\d+)\.conv\.1\.1", "stages.@.depthwise"),
    (r"features\.(\d+)\.conv\.2", r"features\.(\d+)\.conv\.3", "stages.@.project"),
)
_TIMM: _Rules = (
    ("conv_stem", "bn1", "stem"),
    ("conv_head", "bn2", "head"),
    (r"blocks\.(0\.0)\.conv_dw", r"blocks\.(0\.0)\.bn1", "stages.@.depthwise"),
    (r"blocks\.(0\.0)\.conv_pw", r"blocks\.(0\.0)\.bn2", "stages.@.project"),
    (r"blocks\.(\d+\.\d+)\.conv_pw", r"blocks\.(\d+\.\d+)\.bn1", "stages.@.expand"),
    (r"blocks\.(\d+\.\d+)\.conv_dw", r"blocks\.(\d+\.\d+)\.bn2", "stages.@.depthwise"),
    (r"blocks\.(\d+\.\d+)\.conv_pwl", r"blocks\.(\d+\.\d+)\.bn3", "stages.@.project"),
)


def _rename(key: str, rules: _Rules, places: Mapping[str, str]) -> str:
    layer, _, tensor = key.rpartition(".")
    for *theirs, ours in rules:
        for pattern, part in zip(theirs, ("conv", "norm"), strict=True):
            if match := re.fullmatch(pattern, layer):
                place = places.get(match[1], "?") if match.groups() else ""
                return f"{ours}.{part}.{tensor}".replace("@", place)
    return re.sub(r"^classifier\.1\.", "classifier.", key)


# Enough to see what it is about.
_MOST_NAMED = 3


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:_MOST_NAMED])
    return listed + (f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else "")
