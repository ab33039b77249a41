"""Libraries that are extras: imported where they are used, and named with their extra where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["extra_of", "require_library"]

# What each extra of pyproject.toml brings.
_BRINGS = {
    "demo": ("gradio",),
    "export": ("onnx", "onnx_ir", "onnxruntime", "onnxscript"),
    "plots": ("matplotlib",),
    "smp": ("segmentation_models_pytorch",),
    "timm": ("timm",),
    "train": ("jsonargparse", "lightning", "scipy", "sklearn", "tensorboard", "torchmetrics", "yaml"),
    "ultralytics": ("ultralytics",),
    "vision": ("PIL", "safetensors", "torchvision"),
    "volumes": ("nibabel",),
}


def extra_of(package: str | None) -> str | None:
    """Which extra brings a package.

    >>> extra_of("torchvision")
    'vision'
    """
    return next((extra for extra, packages in _BRINGS.items() if package in packages), None)


def require_library(library: str, wanted_by: str) -> Any:
    """Import a library that is an extra, and say in one line what to install where it is missing.

    Example:
        >>> require_library("torchvision", "resnet50").__name__
        'torchvision'
    """
    package = library.split(".")[0]
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:  # the library is there, something that it needs is not
            raise
        message = f"{wanted_by} needs {package}: pip install 'kronattn[{extra_of(package)}]'"
        raise ModuleNotFoundError(message, name=package) from None
