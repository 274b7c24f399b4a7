"""Counts that need not be even: rows of replicas, blocks of stages. Their spans, and their names."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby

MOST_RUNS = 8
"""Runs of equal counts that a name spells out."""


def span(counts: tuple[int, ...], index: int) -> tuple[int, int]:
    """Half-open range of part ``index`` where parts of these sizes follow each other.

    >>> span((5, 1, 2), 2)
    (6, 8)
    """
    ends = _ends(counts)
    return ends[index] - counts[index], ends[index]


@lru_cache(maxsize=64)
def _ends(counts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(counts))


def counts_name(counts: Sequence[int]) -> str:
    """Name of a list of counts: runs of equal ones; of many runs the ends of their range and a checksum.

    >>> counts_name((10, 10, 10, 2)), counts_name(tuple(range(1, 30)))
    ('10x3_2', '1to29_ddcbdaca')
    """
    runs = [(count, len(list(same))) for count, same in groupby(counts)]
    if len(runs) > MOST_RUNS:
        checksum = zlib.crc32(",".join(map(str, counts)).encode())
        return f"{min(counts)}to{max(counts)}_{checksum:08x}"
    return "_".join(f"{count}x{times}" if times > 1 else str(count) for count, times in runs)
