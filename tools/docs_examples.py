"""Called by mkdocstrings: our docstrings say "Example:", and the parser knows doctests under "Examples:" alone."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section, also where a docstring has its doctest without any heading."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
        if ">>> " in value and "Examples:" not in value:
            before, _, doctest = value.partition(">>> ")
            lines = f">>> {doctest}".splitlines()
            value = before.rstrip() + "\n\nExamples:\n" + "\n".join(f"    {line}" for line in lines)
        obj.docstring.value = value
