"""Spans of time in words, as command lines take them."""

from __future__ import annotations

import re

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


def seconds_of(span: str) -> float | None:
    """Return the seconds of a span such as 90s, 30m, 1.5h or 2d; None where it is none.

    >>> seconds_of("90s"), seconds_of("1.5h"), seconds_of("soon")
    (90.0, 5400.0, None)
    """
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", span)
    return float(found[1]) * _UNITS[found[2]] if found else None
