"""Called by mkdocs, for what Markdown would get wrong: examples with prompts, and Sphinx's roles in docstrings."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Have examples with prompts coloured as such, so that the style sheet can leave the prompts out of copies."""
    return re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Drop ":func:" and its like in front of code."""
    return re.sub(r":(?:func|class|meth|mod|attr):(?=<code)", "", html)
