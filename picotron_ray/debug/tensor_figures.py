"""Figures of a tensor that those of its parts add up to: norm, least, greatest, a histogram of fixed buckets.

Ranks hold parts of one tensor. Since buckets are the same everywhere, whoever asks adds parts up without a
collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

POWERS = range(-8, 5)
EDGES = (*(-(10.0**power) for power in reversed(POWERS)), *(10.0**power for power in POWERS))
"""Edges of the buckets: a bucket for each power of ten, of each sign; what is smaller lies in the middle."""


def added(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of a whole from those of its parts; at least one.

    >>> half = {"numel": 1, "norm": 3.0, "min": 3.0, "max": 3.0, "nonfinite": 0, "histogram": [0, 1]}
    >>> added([half, {**half, "norm": 4.0, "min": 4.0, "max": 4.0, "histogram": [1, 0]}])["norm"]
    5.0
    """
    found = list(parts)
    valued = [part for part in found if part["min"] is not None]
    return {
        "numel": sum(part["numel"] for part in found),
        "norm": math.sqrt(sum(part["norm"] ** 2 for part in found)),
        "min": min((part["min"] for part in valued), default=None),
        "max": max((part["max"] for part in valued), default=None),
        "nonfinite": sum(part["nonfinite"] for part in found),
        "histogram": [sum(counts) for counts in zip(*(part["histogram"] for part in found), strict=True)],
    }


def whole_tensors(ranks: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Add up what ranks say of their boxes; a box that several hold counts once.

    Args:
        ranks: by rank, entries with ``name``, ``offset``, ``size`` and figures.
    """
    boxes: dict[str, dict[str, Mapping[str, Any]]] = {}
    for entries in ranks:
        for entry in entries:
            box = f"{entry['offset']}{entry['size']}"
            boxes.setdefault(entry["name"], {}).setdefault(box, entry)
    return {name: added(parts.values()) for name, parts in boxes.items()}


def top_names(names: Iterable[str]) -> list[str]:
    """Return how the names of tensors begin, moments as ``MOMENT/``.

    >>> top_names(["embed.weight", "layers.0.w", "layers.1.w", "exp_avg/embed.weight", "exp_avg/layers.0.w"])
    ['embed', 'layers', 'exp_avg/']
    """
    return list(dict.fromkeys(f"{n.partition('/')[0]}/" if "/" in n else n.partition(".")[0] for n in names))


def histogram_text(counts: Sequence[int]) -> str:
    """Say a histogram in one line: the buckets that are not empty.

    >>> counts = [0] * 27
    >>> counts[13], counts[14], counts[25] = 2, 3, 1
    >>> histogram_text(counts)
    '2 below 1e-08, 3 from 1e-08, 1 from 1e+03'
    """
    parts = []
    for place, count in enumerate(counts):
        if count:
            parts.append(f"{count} {_bucket(place)}")
    return ", ".join(parts)


def _bucket(place: int) -> str:
    middle = len(POWERS)
    if place == middle:
        return f"below {EDGES[middle]:.0e}"
    return f"to {EDGES[place]:.0e}" if place < middle else f"from {EDGES[place - 1]:.0e}"
