"""Ledger line, read with distrust: it may have been cut, edited or damaged."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """Ledger line as the check needs it; ``rows`` is (first, last, digest) per DP replica."""

    step: int
    generation: tuple[int, int]
    samples: tuple[int, int]
    rows: tuple[tuple[int, int, str], ...]
    tokens: int
    skipped: bool = False  # the update was left out

    @property
    def name(self) -> str:
        return f"step {self.step} of generation {self.generation[0]}.{self.generation[1]}"


def parse_line(raw: str | Mapping[str, Any], at: int, wrong: list[str]) -> LedgerLine | None:
    """Parse one line; None and a finding where it is no valid ledger line."""
    try:
        record = json.loads(raw) if isinstance(raw, str) else raw
        return LedgerLine(
            step=_whole(record["step"], 1),
            generation=(_whole(record["term"]), _whole(record["n"])),
            samples=(_whole(record["samples"][0]), _whole(record["samples"][1])),
            rows=tuple(
                (_whole(first), _whole(last), _digest(hexes)) for first, last, hexes in record["rows"]
            ),
            tokens=_whole(record["tokens"]),
            skipped=bool(record.get("skipped", "")),
        )
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        wrong.append(f"line {at} is not a ledger line ({type(error).__name__}: {error})")
        return None


def _whole(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 62:
        raise ValueError(f"expected a whole number of at least {least}, saw {value!r}")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise ValueError(f"expected 32 hex digits, saw {value!r}")
    return value
