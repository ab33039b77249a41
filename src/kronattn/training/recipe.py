"""A recipe: everything that decides how a network is trained, as typed settings read from YAML.

jsonargparse merges overrides, converts and checks types. Misspelt keys are caught before it, with the nearest right
one. A recipe may name another that it ``extends``, and give what differs alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from kronattn.data.transforms import ImageSettings

__all__ = [
    "DataSettings",
    "ModelSettings",
    "OptimiserSettings",
    "Recipe",
    "ScheduleSettings",
    "load_recipe",
    "recipe_path",
    "recipe_yaml",
]

# In a checkout the recipes lie beside the sources; an installed package has a copy.
_SHIPPED = (Path(__file__).parents[3] / "recipes", Path(__file__).parents[1] / "recipes")


@dataclass
class ModelSettings:
    """Which network.

    Args:
        name: one of ``kronattn.list_models()``, or ``timm/NAME``.
        options: for ``create_model``; ``num_classes`` comes from the data.
        weights: a file to start from; the classifier is taken where the number of classes is the same.
    """

    name: str = "kanet_kv"
    options: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None


@dataclass
class DataSettings:
    """Which images, and how they reach the network.

    Args:
        name: one of ``kronattn.data.classification.DATASETS``.
        path: where they lie: a folder, a tar archive, a pattern.
        images: how each is prepared.
        in_memory: decode once and augment in batches on the device; "auto": where they take up to 8 GB.
        workers: processes that decode, where images are not kept in memory.
        skip_bad_images: count and leave out images that cannot be read, instead of stopping.
    """

    name: str = "folder"
    path: str | None = None
    images: ImageSettings = field(default_factory=ImageSettings)
    in_memory: Literal["auto", "yes", "no"] = "auto"
    workers: int = 8
    skip_bad_images: bool = False


@dataclass
class OptimiserSettings:
    """How weights move.

    Args:
        name: "sgd" or "adamw".
        lr: the learning rate, for the recipe's batch size.
        momentum: of SGD.
        nesterov: SGD's variant of it.
        weight_decay: of every weight or, without ``decay_vectors``, of matrices and kernels alone.
        decay_vectors: whether norms' parameters and biases decay, too.
        clip: the largest norm of the gradient; none by default.
    """

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 4e-5
    decay_vectors: bool = True
    clip: float | None = None


@dataclass
class ScheduleSettings:
    """How the learning rate changes.

    Args:
        name: "steps" (divided by ten at ``milestones``), "cosine" (to zero), "poly" (to zero with ``power``).
        milestones: epochs.
        power: of "poly".
        warmup: epochs in which the learning rate rises from nearly zero.
    """

    name: Literal["steps", "cosine", "poly"] = "cosine"
    milestones: list[int] = field(default_factory=list)
    power: float = 0.9
    warmup: float = 0.0


@dataclass
class Recipe:
    """How a network is trained.

    Args:
        task: what it learns.
        model: which network.
        data: which images.
        optimiser: how weights move.
        schedule: how the learning rate changes.
        epochs: passes over the data.
        batch_size: images in a step, over all devices together.
        label_smoothing: share of the target that is spread over all classes.
        ema: decay of the weights' moving average, which is what is evaluated and kept; none by default.
        precision: Lightning's: "32-true", "bf16-mixed", "16-mixed".
        channels_last: keep channels side by side in memory.
        compile: through torch.compile.
        sync_batch_norm: statistics over all devices' batches.
        seed: of weights, order and augmentation.
        accelerator: Lightning's: "auto", "cpu", "gpu".
        devices: processes, one for each device.
        nodes: machines.
        output: the run's folder; ``runs/<recipe>-<model>-seed<n>`` by default.
    """

    task: Literal["classification"] = "classification"
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    epochs: int = 100
    batch_size: int = 256
    label_smoothing: float = 0.0
    ema: float | None = None
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    channels_last: bool = False
    compile: bool = False
    sync_batch_norm: bool = True
    seed: int = 0
    accelerator: str = "auto"
    devices: int = 1
    nodes: int = 1
    output: str | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "devices", "nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.batch_size % (self.devices * self.nodes):
            raise ValueError(
                f"batch_size {self.batch_size} must be a multiple of the {self.devices * self.nodes} devices"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must lie between 0 and 1, not {self.ema}")


def load_recipe(path: str | Path | None, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and change some of it.

    Args:
        path: a YAML file, or the name of a recipe that comes with kronattn; ``None`` starts from the defaults.
        overrides: ``key=value``, with dots into the settings: ``"optimiser.lr=0.05"``.

    Example:
        >>> recipe = load_recipe(None, ["epochs=3", "optimiser.lr=0.05", "data.images.scale=[0.5, 1.0]"])
        >>> recipe.epochs, recipe.optimiser.lr, recipe.data.images.scale
        (3, 0.05, (0.5, 1.0))
        >>> load_recipe(None, ["optimiser.learning_rat=0.05"])
        Traceback (most recent call last):
        ...
        ValueError: unknown key 'optimiser.learning_rat': known here are name, lr, momentum, nesterov, weight_decay, ...
    """
    arguments = []
    if path is not None:
        arguments.append("--config=" + yaml.safe_dump(_read_recipe(recipe_path(path))))
    for override in overrides:
        key, equals, _ = override.partition("=")
        if not equals:
            raise ValueError(f"expected key=value, got {override!r}")
        _check_path(key.removeprefix("--").split("."), Recipe)
        arguments.append("--" + override.removeprefix("--"))
    parser = _parser()
    try:
        found = parser.instantiate(parser.parse_args(arguments))
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).replace("Parser key", "the recipe's").split())) from None
    return Recipe(**{entry.name: found[entry.name] for entry in fields(Recipe)})


def recipe_path(name: str | Path) -> Path:
    """The file of a recipe: a path, or the name of one that comes with kronattn, such as ``imagenet/kanet_kv``.

    Example:
        >>> recipe_path("digits").name
        'digits.yaml'
    """
    if Path(name).exists():
        return Path(name)
    for folder in _SHIPPED:
        shipped = folder / Path(name).with_suffix(".yaml")
        if shipped.exists():
            return shipped
    raise FileNotFoundError(f"there is no recipe {name}")


def recipe_yaml(recipe: Recipe) -> str:
    """A recipe as YAML that :func:`load_recipe` reads.

    Example:
        >>> "epochs: 3" in recipe_yaml(load_recipe(None, ["epochs=3"]))
        True
    """
    return yaml.safe_dump(_plain(recipe), sort_keys=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _parser() -> ArgumentParser:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(Recipe)
    return parser


def _read_recipe(path: Path) -> dict[str, Any]:
    """A recipe's keys and values, on top of those of the recipe that it ``extends``."""
    found = _read_yaml(path)
    base = found.pop("extends", None)
    _check_keys(found, where=f"{path}: ")
    return found if base is None else _merged(_read_recipe(path.parent / base), found)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except (FileNotFoundError, IsADirectoryError):
        raise FileNotFoundError(f"there is no recipe {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a recipe: expected keys and values")
    return found


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in top.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def _check_keys(found: Mapping[str, Any], where: str, above: tuple[str, ...] = ()) -> None:
    for key, value in found.items():
        path = (*above, str(key))
        settings = _check_path(path, Recipe, where)
        if isinstance(value, Mapping):
            _check_keys(value, where, path)
        elif is_dataclass(settings):
            raise ValueError(f"{where}{'.'.join(path)} holds settings: expected keys and values, not {value!r}")


def _check_path(keys: Sequence[str], settings: Any, where: str = "") -> Any:
    """The type that a path of keys leads to; a key that does not exist is an error with the nearest one that does."""
    for depth, key in enumerate(keys):
        if not is_dataclass(settings):
            # Free-form options: create_model knows which are right.
            return Any
        known = [entry.name for entry in fields(settings)]
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else "known here are " + ", ".join(known)
            raise ValueError(f"{where}unknown key {'.'.join(keys[: depth + 1])!r}: {hint}")
        settings = get_type_hints(settings)[key]
    return settings
