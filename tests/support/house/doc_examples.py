"""Code that the pages of docs/ show, for tests that run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[3] / "docs"


def python_blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)


def defined(page: str) -> dict[str, Any]:
    """Names that a page's Python blocks define, run one after the other."""
    names: dict[str, Any] = {}
    for block in python_blocks(page):
        exec(block, names)
    return names
