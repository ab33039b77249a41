"""Called by mkdocs: docstrings are written with Sphinx's roles, which Markdown would print as they are."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Drop ":func:" and its like in front of code."""
    return re.sub(r":(?:func|class|meth|mod|attr):(?=<code)", "", html)
