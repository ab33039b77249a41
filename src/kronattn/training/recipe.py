"""A recipe: everything that decides how a network is trained, as typed settings read from YAML.

jsonargparse merges overrides, converts and checks types. Misspelt keys are caught before it, with the nearest right
one. A recipe may name another that it ``extends``, and give what differs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from kronattn.data.transforms import check_not_negative, check_shares
from kronattn.names import near_names
from kronattn.nn.context_registry import parse_context
from kronattn.tasks import Task, find_task

__all__ = [
    "DataSettings",
    "ModelSettings",
    "OptimiserSettings",
    "Recipe",
    "ScheduleSettings",
    "data_settings",
    "list_recipes",
    "load_recipe",
    "read_yaml",
    "recipe_class",
    "recipe_path",
    "recipe_yaml",
    "shipped",
    "without_places",
]


@dataclass
class ModelSettings:
    """Which network.

    Args:
        name: one of ``kronattn.list_models()``, or ``timm/NAME``.
        options: for ``create_model``; ``num_classes`` comes from the data.
        weights: what to start from: a file, a run's folder, or the name of a network that comes with weights; a file of
            timm's or torchvision's MobileNetV2 serves, too. The classifier is taken where the number of classes is the
            same.
        context: the layer in the place of the network's attention, one of ``kronattn.nn.list_contexts()``, with options
            or without (``kao_qkv:positions=learned``); the same as ``options.context``.
    """

    name: str = "kanet_kv"
    options: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None
    context: str | None = None

    def __post_init__(self) -> None:
        if self.context is None:
            return
        parse_context(self.context)
        other = self.options.get("context", self.context)
        if other != self.context:
            raise ValueError(f"model.context is {self.context!r}, but model.options.context is {other!r}: give one")

    @property
    def all_options(self) -> dict[str, Any]:
        """What ``create_model`` is to be given."""
        return self.options if self.context is None else {**self.options, "context": self.context}

    @property
    def label(self) -> str:
        """What tells the network from others in a comparison: its name and, where it is another, its context layer."""
        context = self.all_options.get("context")
        return self.name if context is None else f"{self.name}+{context}"


@dataclass
class DataSettings:
    """Which images, and how they reach the network.

    Args:
        name: the kind of dataset, one of ``DATASETS`` in ``kronattn.data.classification`` or ``.segmentation``.
        path: where it lies: a folder, a tar archive, a pattern.
        in_memory: decode once and keep; "auto": where that takes up to 8 GB.
        workers: processes that prepare images, where that is not done in batches on the device.
        skip_bad_images: count and leave out images that cannot be read, instead of stopping.
    """

    name: str = "folder"
    path: str | None = None
    in_memory: Literal["auto", "yes", "no"] = "auto"
    workers: int = 8
    skip_bad_images: bool = False

    def __post_init__(self) -> None:
        check_not_negative(self, "workers")


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
        head_factor: what the learning rate of a classifier's last layer, or of a segmenter's head, is multiplied with.
        clip: the largest norm of the gradient; none by default.
    """

    name: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 4e-5
    decay_vectors: bool = True
    head_factor: float = 1.0
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


COMPILE_MODES = ("auto", "reduce-overhead", "max-autotune")


@dataclass
class Recipe:
    """How a network is trained, whatever it learns.

    Args:
        task: what it learns.
        model: which network.
        data: which images.
        optimiser: how weights move.
        schedule: how the learning rate changes.
        epochs: passes over the data.
        iterations: steps, instead of epochs.
        freeze_epochs: the first epochs, in which a classifier or a segmenter's head learns alone.
        batch_size: images in a step, over all devices together.
        label_smoothing: share of the target that is spread over all classes.
        ema: decay of the weights' moving average, which is what is evaluated and kept; none by default.
        precision: Lightning's: "32-true", "bf16-mixed", "16-mixed".
        channels_last: keep channels side by side in memory.
        compile: "auto": whole steps as CUDA graphs on a GPU, nothing on a CPU; true: through torch.compile, or the name
            of one of its modes; false: neither.
        deterministic: only kernels that give the same bits every time, on a GPU too, where that is slower.
        cache: a folder for what later runs can use again: decoded images, compiled code.
        sync_batch_norm: statistics over all devices' batches.
        validate_every: epochs between validations.
        seed: of weights, order and augmentation.
        accelerator: Lightning's: "auto", "cpu", "gpu".
        devices: processes, one for each device.
        nodes: machines.
        threads: of the CPU; the bits of a run on the CPU depend on their number, so ``kronattn train`` notes here
            what it ran with.
        output: the run's folder; ``runs/<recipe>-<model>-seed<n>`` by default.
    """

    task: str = "classification"
    model: ModelSettings = field(default_factory=ModelSettings)
    data: Any = field(default_factory=DataSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    epochs: int = 100
    iterations: int | None = None
    freeze_epochs: int = 0
    batch_size: int = 256
    label_smoothing: float = 0.0
    ema: float | None = None
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    channels_last: bool = False
    compile: bool | str = "auto"
    deterministic: bool = False
    cache: str | None = None
    sync_batch_norm: bool = True
    validate_every: int = 1
    seed: int = 0
    accelerator: str = "auto"
    devices: int = 1
    nodes: int = 1
    threads: int | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "devices", "nodes", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("iterations", "threads"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, not {count}")
        check_shares(self, "label_smoothing")
        processes = self.devices * self.nodes
        check_not_negative(self, "freeze_epochs")
        if self.freeze_epochs and processes > 1:
            raise ValueError("freeze_epochs is for one device: several wait for the gradients of every weight")
        if self.batch_size % processes:
            raise ValueError(f"batch_size {self.batch_size} must be a multiple of the {processes} devices")
        if isinstance(self.compile, str) and self.compile not in COMPILE_MODES:
            modes = f"{', '.join(COMPILE_MODES[:-1])} or {COMPILE_MODES[-1]}"
            raise ValueError(f"compile must be true, false, {modes}, not {self.compile!r}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must lie between 0 and 1, both excluded, not {self.ema:g}: ema=null turns it off")


@cache
def data_settings(task: Task) -> type[DataSettings]:
    """The settings of a task's data: ``images`` says how they are prepared.

    Example:
        >>> from kronattn.tasks import find_task
        >>> data_settings(find_task("classification"))().images.size
        224
    """
    images = ("images", task.settings, field(default_factory=task.settings))
    return make_dataclass("TaskData", [images], bases=(DataSettings,), namespace={"__module__": __name__})


@cache
def recipe_class(name: str) -> type[Recipe]:
    """The recipes of a task: its name, its usual network, and the settings of its data.

    Example:
        >>> recipe_class("segmentation")().model.name
        'deeplabv2_kao_kv'
    """
    task = find_task(name)
    data = data_settings(task)
    own: list[tuple[str, Any, Any]] = [
        ("task", str, field(default=name)),
        ("model", ModelSettings, field(default_factory=lambda: ModelSettings(task.network))),
        ("data", data, field(default_factory=data)),
    ]
    return make_dataclass("TaskRecipe", own, bases=(Recipe,), namespace={"__module__": __name__})


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
    changes = dict(_split(override) for override in overrides)
    written = {} if path is None else _read_recipe(recipe_path(path))
    task = changes.get("task", written.get("task", "classification"))
    if not isinstance(task, str):
        raise ValueError(f"{path}: task must be a name, such as classification, not {task!r:.80}")
    kind = recipe_class(task)
    _check_keys(written, kind, where=f"{path}: ")
    for key, value in changes.items():
        _check_null(None if value == "null" else value, _check_path(key.split("."), kind), key)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_class_arguments(kind)
    arguments = [f"--config={yaml.safe_dump(written)}"] if written else []
    try:
        found = parser.instantiate(parser.parse_args([*arguments, *(f"--{k}={v}" for k, v in changes.items())]))
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).replace("Parser key", "the recipe's").split())) from None
    except OverflowError as error:
        raise ValueError(f"the recipe has a number that is too large: {error}") from None
    return kind(**{entry.name: found[entry.name] for entry in fields(kind)})


def recipe_path(name: str | Path) -> Path:
    """The file of a recipe: a path, or the name of one that comes with kronattn, such as ``imagenet/kanet_kv``.

    Example:
        >>> recipe_path("digits").name
        'digits.yaml'
    """
    # A folder of that name, such as photos/, is none.
    if Path(name).is_file():
        return Path(name)
    known = shipped("recipes")
    found = known.get(Path(name).with_suffix("").as_posix())
    if found is None:
        raise FileNotFoundError(f"there is no recipe {name}: {near_names(str(name), known)}")
    return found


def shipped(kind: str) -> dict[str, Path]:
    """The files of a kind that come with kronattn, "recipes" or "studies", by name.

    In a checkout they lie beside the sources; an installed package has a copy.
    """
    places = (Path(__file__).parents[3] / kind, Path(__file__).parents[1] / kind)
    folder = next((place for place in places if place.is_dir()), places[-1])
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def list_recipes() -> dict[str, str]:
    """The recipes that come with kronattn, by name, each with the comment at its top.

    Example:
        >>> list_recipes()["digits"].startswith("The embedded default")
        True
    """
    return {name: _first_comment(path) for name, path in shipped("recipes").items()}


def _first_comment(path: Path) -> str:
    """The comment that a recipe begins with, or the one of the recipe that it extends."""
    first = path.read_text().splitlines()[0]
    if first.startswith("extends: "):
        return _first_comment(path.parent / first.removeprefix("extends: "))
    return first.removeprefix("# ")


def recipe_yaml(recipe: Recipe) -> str:
    """A recipe as YAML that :func:`load_recipe` reads.

    Example:
        >>> "epochs: 3" in recipe_yaml(load_recipe(None, ["epochs=3"]))
        True
    """
    return yaml.safe_dump(_plain(recipe), sort_keys=False)


def without_places(recipe: Recipe) -> Recipe:
    """The recipe for others to read: where the data lay and the run went is of no use elsewhere.

    Example:
        >>> without_places(load_recipe(None, ["data.path=here", "output=there", "cache=c"])) == load_recipe(None)
        True
    """
    return replace(recipe, data=replace(recipe.data, path=None), output=None, cache=None)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    return list(value) if isinstance(value, tuple) else value


def _split(override: str) -> tuple[str, str]:
    key, equals, value = override.removeprefix("--").partition("=")
    if not equals:
        raise ValueError(f"expected key=value, got {override!r}")
    return key, value


def _read_recipe(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe's keys and values, on top of those of the recipe that it ``extends``."""
    if path.resolve() in extending:
        raise ValueError(f"{path} extends itself")
    found = read_yaml(path)
    base = found.pop("extends", None)
    if base is None:
        return found
    if not isinstance(base, str):
        raise ValueError(f"{path}: extends must be the path of a recipe, not {base!r:.80}")
    return _merged(_read_recipe(path.parent / base, (*extending, path.resolve())), found)


class _EachKeyOnce(yaml.SafeLoader):
    """Of a key that is there twice PyYAML keeps the last, and says nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in known:
                raise ValueError(f"key {key.value!r} is there twice, again in line {key.start_mark.line + 1}")
            known.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, what: str = "recipe") -> dict[str, Any]:
    """A file's keys and values; one line says why there are none."""
    try:
        found = yaml.load(path.read_text(), _EachKeyOnce)
    except (FileNotFoundError, IsADirectoryError):
        raise FileNotFoundError(f"there is no {what} {path}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{path} is not a {what}: it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a {what}: expected keys and values")
    return found


def _merged(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in top.items():
        inner = result.get(key)
        result[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def _check_keys(found: Mapping[str, Any], kind: type[Recipe], where: str, above: tuple[str, ...] = ()) -> None:
    for key, value in found.items():
        path = (*above, str(key))
        settings = _check_path(path, kind, where)
        _check_null(value, settings, f"{where}{'.'.join(path)}")
        if isinstance(value, Mapping):
            _check_keys(value, kind, where, path)
        elif is_dataclass(settings):
            raise ValueError(f"{where}{'.'.join(path)} holds settings: expected keys and values, not {value!r}")


def _check_null(value: Any, settings: Any, where: str) -> None:
    """Refuse null, or nothing at all, where a setting needs a value: jsonargparse takes it."""
    if value is None and settings is not Any and type(None) not in get_args(settings):
        raise ValueError(f"{where} is null: give a value, or leave it out")


def _check_path(keys: Sequence[str], settings: Any, where: str = "") -> Any:
    """The type that a path of keys leads to; a key that does not exist is an error with the nearest one that does."""
    for depth, key in enumerate(keys):
        if not is_dataclass(settings):
            # Free-form options: create_model knows which are right.
            return Any
        known = [entry.name for entry in fields(settings)]
        if key not in known:
            hint = near_names(key, known, most=1).replace("known are", "known here are")
            raise ValueError(f"{where}unknown key {'.'.join(keys[: depth + 1])!r}: {hint}")
        settings = get_type_hints(settings)[key]
    return settings
