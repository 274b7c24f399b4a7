"""Diagnosis of a wrong digest: one sample skipped, repeated, swapped or taken from elsewhere.

A digest that does not match says only that something is wrong. Feeding goes wrong in few ways, though, and
each of them can be tried: make the rows as the deviation would have fed them, and compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt

from picotron_ray.data.batch import token_digest

MOST_TRIES = 20_000
Kind = Literal["skipped", "repeated", "swapped", "replaced"]
_Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Deviation:
    """Deviation from the right rows: its kind, its rows (numbers within the window), and the rows fed."""

    kind: Kind
    row: int
    other: int
    fed: _Rows

    def describe(self, base: int) -> str:
        """One phrase with global sample numbers; ``base`` is that of the window's first row."""
        row, other = self.row + base, self.other + base
        return {
            "skipped": f"skipped sample {row}",
            "repeated": f"fed sample {row} twice",
            "swapped": f"fed samples {row} and {other} in each other's place",
            "replaced": f"fed sample {other} in the place of {row}",
        }[self.kind]


def diagnose(
    window: _Rows,
    first: int,
    last: int,
    digest: bytes,
    shared: Callable[[bytes], bytes] = bytes,
    tries: int = MOST_TRIES,
) -> Deviation | None:
    """Find the deviation that makes rows ``first .. last`` of ``window`` (token rows) hash to ``digest``.

    Args:
        shared: digest that comes of the rows' own, where replicas share one.
    """
    for deviation in islice(_deviations(first, last, len(window)), tries):
        if shared(token_digest(window[deviation.fed])) == digest:
            return deviation
    return None


def _deviations(first: int, last: int, rows: int) -> Iterator[Deviation]:
    """Yield single deviations, likelier ones first; each keeps the number of rows, or loses or adds one."""
    right = np.arange(first, last)
    for row in range(first, last):
        at = row - first
        without = np.delete(right, at)
        if last < rows:
            yield Deviation("skipped", row, row, np.append(without, last))
        yield Deviation("skipped", row, row, without)
        twice = np.insert(right, at, row)
        yield Deviation("repeated", row, row, twice[:-1])
        yield Deviation("repeated", row, row, twice)
    for row in range(first, last):
        for other in range(row + 1, last):
            fed = right.copy()
            fed[row - first], fed[other - first] = other, row
            yield Deviation("swapped", row, other, fed)
    for row in range(first, last):
        for other in range(rows):
            fed = right.copy()
            fed[row - first] = other
            yield Deviation("replaced", row, other, fed)
