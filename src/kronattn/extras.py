"""Libraries that are extras: imported where they are used, and named with their extra where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["require_library"]


def require_library(library: str, wanted_by: str, *, extra: str) -> Any:
    """Import a library that is an extra, and say in one line what to install where it is missing.

    Example:
        >>> require_library("torch", "resnet50", extra="vision").__name__
        'torch'
    """
    package = library.split(".")[0]
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != package:  # the library is there, something that it needs is not
            raise
        message = f"{wanted_by} needs {package}: pip install 'kronattn[{extra}]'"
        raise ModuleNotFoundError(message, name=package) from None
