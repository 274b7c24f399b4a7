"""Output of commands: JSON values, and tables of rows."""

from __future__ import annotations

import json
from typing import Any


def emit(value: Any) -> None:
    """Print a value as one line of JSON."""
    print(json.dumps(value), flush=True)


def table(rows: list[dict[str, Any]], as_json: bool, empty: str = "") -> None:
    """Print rows of equal keys: as one JSON list, or as aligned text.

    Args:
        empty: text that stands for no rows.
    """
    if as_json:
        return emit(rows)
    if not rows:
        return print(empty)
    cells = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return None


def _cell(value: Any) -> str:
    return ("; ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)
