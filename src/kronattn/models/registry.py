"""Models by name. A new network is one entry in a table of variants, or one line here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from kronattn.extras import require_library
from kronattn.models.deeplab import SEGMENTERS
from kronattn.models.kanet import VARIANTS, KANet
from kronattn.models.unet import UNET_VOLUMES, UNETS
from kronattn.models.weights import adapt_first_convolution
from kronattn.names import near_names

__all__ = [
    "CLASSIFIERS",
    "MODELS",
    "PACKAGED_TAG",
    "create_model",
    "list_models",
    "packaged_names",
    "packaged_weights",
    "task_of",
]

CLASSIFIERS: dict[str, Callable[..., nn.Module]] = {name: partial(KANet, name) for name in VARIANTS}
_BY_TASK = {"classification": CLASSIFIERS, "segmentation": {**SEGMENTERS, **UNETS}, "volumes": UNET_VOLUMES}
MODELS: dict[str, Callable[..., nn.Module]] = {
    name: build for networks in _BY_TASK.values() for name, build in networks.items()
}

_WEIGHTS = Path(__file__).parent.parent / "weights"
# What the packaged weights were trained on, which is their tag in timm.
PACKAGED_TAG = "imagenette"

# Options that change no weight.
_FITS_WEIGHTS = ("drop_rate", "drop_path_rate", "global_pool", "output_stride")
_FIRST = "stem.conv.weight"

# What timm wraps around a model that it builds.
_TIMM_OPTIONS = ("features_only", "out_indices", "feature_cls")


def list_models(task: str | None = None) -> list[str]:
    """The names that :func:`create_model` knows: all, or those for "classification", "segmentation" or
    "volumes".

    Example:
        >>> "kanet_kv" in list_models()
        True
        >>> list_models("segmentation")
        ['deeplabv2_aspp', 'deeplabv2_attn', 'deeplabv2_kao_kv', 'deeplabv2_kao_qkv', 'unet']
    """
    if task is not None and task not in _BY_TASK:
        raise ValueError(f"task must be {', '.join(_BY_TASK)}, not {task!r}")
    return list(MODELS if task is None else _BY_TASK[task])


def task_of(name: str) -> str:
    """What a network is for: (N, C, H, W) to (N, K) in "classification", to (N, K, H, W) in "segmentation"; "volumes"
    are segmentation with three axes.

    Example:
        >>> task_of("deeplabv2_kao_kv")
        'segmentation'
    """
    _check_name(name)
    return next(task for task, builders in _BY_TASK.items() if name in builders)


def create_model(name: str, *, pretrained: bool = False, **options: Any) -> nn.Module:
    """Build a network by its name.

    Args:
        name: one of :func:`list_models`.
        pretrained: load the weights that come with the package. ``num_classes`` is then that of the weights; another
            one keeps the features and gives the network a new classifier. Another ``in_chans`` adapts the first
            convolution, as timm does.
        options: the network's own, such as ``num_classes``, ``in_chans``, ``width``, ``drop_rate``; with timm
            installed also timm's ``features_only`` and ``out_indices``. Those of segmentation are in
            :class:`kronattn.models.DeepLabV2`.

    Example:
        >>> model = create_model("kanet_kv", num_classes=10)
        >>> model(torch.randn(1, 3, 64, 64)).shape
        torch.Size([1, 10])
    """
    _check_name(name)
    if any(option in options for option in _TIMM_OPTIONS):
        if name not in CLASSIFIERS:
            raise ValueError(f"{name} has no features_only: that is for classifiers")
        timm = require_library("timm", "features_only")
        if pretrained:
            packaged_weights(name)  # which says what there is
            timms = (*_TIMM_OPTIONS, *inspect.signature(timm.create_model).parameters)
            _check_fits_weights(option for option in options if option not in timms)
            options["pretrained_cfg"] = PACKAGED_TAG
        return timm.create_model(name, pretrained=pretrained, **options)
    if pretrained:
        return _create_pretrained(name, options)
    try:
        return MODELS[name](**options)
    except TypeError as error:
        # Python's own message names a class and its __init__, which the caller has not heard of.
        raise TypeError(f"{name}: {str(error).split('() ')[-1]}") from None


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a model must be a str, not {type(name).__name__}")
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: {near_names(name, MODELS)}")


def packaged_names() -> list[str]:
    """The networks whose weights come with the package.

    Example:
        >>> "kanet_kv" in packaged_names()
        True
    """
    return sorted(file.stem for file in _WEIGHTS.glob("*.safetensors"))


def packaged_weights(name: str) -> Path:
    """The file with the weights of a network that come with the package."""
    if name not in packaged_names():
        raise ValueError(f"there are no pretrained weights for {name!r}: there are for {', '.join(packaged_names())}")
    return _WEIGHTS / f"{name}.safetensors"


def _check_fits_weights(options: Iterable[str]) -> None:
    taken = ("num_classes", "in_chans", *_FITS_WEIGHTS)
    if unfit := [option for option in options if option not in taken]:
        listed = f"{', '.join(taken[:-1])} and {taken[-1]}"
        raise ValueError(f"pretrained=True takes {listed}; {', '.join(unfit)} would not fit the weights")


def _create_pretrained(name: str, options: dict[str, Any]) -> nn.Module:
    """The packaged weights; another number of classes keeps the features and gets a new classifier, other channels of
    the image an adapted first convolution: both as in timm."""
    from kronattn.models.files import load_model

    classes, channels = options.pop("num_classes", None), options.pop("in_chans", 3)
    _check_fits_weights(options)
    model, description = load_model(packaged_weights(name))
    if options or channels != 3:
        state = model.state_dict()
        model = create_model(name, **description.options | options | {"in_chans": channels})
        state[_FIRST] = adapt_first_convolution(state[_FIRST], channels)
        model.load_state_dict(state)
    if classes is not None and classes != len(description.classes):
        model.reset_classifier(classes)  # type: ignore[operator]
    return model.train()
