"""The networks as timm models: imported with timm, never without it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from kronattn.models.deeplab import SEGMENTERS
from kronattn.models.files import read_description
from kronattn.models.kanet import VARIANTS, KANet
from kronattn.models.registry import PACKAGED_TAG, packaged_names, packaged_weights

# register_model adds each name.
__all__ = ["default_cfgs"]

_CONFIG = {
    "url": "",
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": (7, 7),
    "crop_pct": 0.875,
    "interpolation": "bicubic",
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "first_conv": "stem.conv",
    "classifier": "classifier",
    "license": "apache-2.0",
}

_SEGMENTATION = _CONFIG | {
    "num_classes": 21,
    "input_size": (3, 321, 321),
    "pool_size": None,
    "crop_pct": 1.0,
    "interpolation": "bilinear",
    "first_conv": "backbone.conv1",
    "classifier": "head",
}


def _config_of(path: Path) -> dict[str, Any]:
    """What a file of weights says of itself, in timm's words."""
    description = read_description(path)
    assert description is not None
    size = description.size
    return _CONFIG | {
        "file": str(path),
        "num_classes": len(description.classes),
        "input_size": (3, size, size),
        "pool_size": (-(-size // 32), -(-size // 32)),
        "crop_pct": size / description.resize,
        "interpolation": "bilinear",
        "mean": tuple(description.mean),
        "std": tuple(description.std),
    }


# What comes with the package is trained on few classes; a network that is built without weights keeps its thousand.
_WITH_WEIGHTS = {name: packaged_weights(name) for name in packaged_names()}

# timm puts a tag with weights before those that came earlier, and one with a star before all: that is the default.
default_cfgs = generate_default_cfgs(
    {f"{name}.{PACKAGED_TAG}": _config_of(path) for name, path in _WITH_WEIGHTS.items()}
    | {f"{name}.untrained*": _CONFIG for name in VARIANTS}
    | {f"{name}.untrained": _SEGMENTATION for name in SEGMENTERS}
)


def _entrypoint(variant: str) -> Any:
    def build(pretrained: bool = False, **options: Any) -> nn.Module:
        _check_indices(options)
        if pretrained and options.get("pretrained_cfg") is None and variant in _WITH_WEIGHTS:
            if options.get("features_only"):
                # segmentation_models_pytorch asks like this for encoder_weights="imagenet".
                raise ValueError(
                    f"{variant} has no weights of ImageNet; those of Imagenette go by the name {variant}.{PACKAGED_TAG}"
                )
            options["pretrained_cfg"] = PACKAGED_TAG
        return build_model_with_cfg(
            partial(KANet, variant),
            variant,
            pretrained,
            feature_cfg={"flatten_sequential": True, "feature_cls": "list"},
            **options,
        )

    return build


def _segmentation_entrypoint(name: str) -> Any:
    def build(pretrained: bool = False, **options: Any) -> nn.Module:
        if options.pop("features_only", False):
            raise ValueError(f"{name} has no features_only: its features are those of its backbone")
        return build_model_with_cfg(SEGMENTERS[name], name, pretrained, **options)

    return build


def _check_indices(options: dict[str, Any]) -> None:
    """timm answers an index that is out of range with an IndexError from deep inside."""
    indices = options.get("out_indices")
    if options.get("features_only") and isinstance(indices, list | tuple):
        for index in indices:
            if not -5 <= index < 5:
                raise ValueError(f"out_indices must lie between 0 and 4 (or -5 and -1), not {index}")


REGISTERED = (*VARIANTS, *SEGMENTERS)
for _name in REGISTERED:
    _build = (_entrypoint if _name in VARIANTS else _segmentation_entrypoint)(_name)
    _build.__name__ = _build.__qualname__ = _name
    _build.__doc__ = f"{_name} of *Kronecker Attention Networks*."
    globals()[_name] = register_model(_build)
