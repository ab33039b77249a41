"""Makes ``timm.create_model("kanet_kv")`` work after ``import kronattn``, without importing timm.

timm takes seconds to import and may not be installed. So nothing is imported here: the models are registered when
timm is, whichever of the two comes first.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["register_when_timm_is_imported"]

_TRIGGER = "timm.models"


def register_when_timm_is_imported() -> None:
    """Register the models with timm now, if timm is imported, or as soon as it is."""
    if _TRIGGER in sys.modules:
        _register()
    elif not any(isinstance(finder, _TimmFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TimmFinder())


def _register() -> None:
    importlib.import_module("kronattn.models.timm_entrypoints")


class _TimmFinder(importlib.abc.MetaPathFinder):
    """Steps aside for every import but that of timm's models, whose loader it wraps once."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _TRIGGER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(importlib.abc.Loader):
    """The loader it wraps, with the registration behind it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module goes by its own loader from here on, as if nobody had looked over its shoulder.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        _register()
