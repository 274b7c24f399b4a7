"""Figures of a round by rank, in columns: who is slow, and in what phase.

A table takes 60 bytes a rank, 1 MB for 16,384 ranks, so a coordinator can hold the newest one. Ranks that
were not heard of are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from picotron_ray.config.schema.telemetry import STEP_PHASES

WAITING = ("bubble", "reduce", "sync")
"""Phases in which a rank waits for others; the seconds of all others are its own."""
COLUMNS = (
    "step_s",
    *(f"{phase}_s" for phase in STEP_PHASES),
    *("utilization_ratio", "allocated_bytes", "peak_bytes", "device_bytes"),
)
PLACE = {name: at for at, name in enumerate(COLUMNS)}
_OWN = [PLACE[f"{phase}_s"] for phase in STEP_PHASES if phase not in WAITING]


class SlowRank(NamedTuple):
    """A rank against the others.

    Fields:
        ratio: its own seconds per step over the ranks' median.
        phase: in which its seconds exceed the median of that phase by the most; "": in none.
        excess_s: by how much.
    """

    rank: int
    own_s: float
    ratio: float
    phase: str
    excess_s: float


def row_of(figures: Mapping[str, float]) -> list[float]:
    """Return a row by names; figures that are not named are 0."""
    return [float(figures.get(name, 0.0)) for name in COLUMNS]


class RankTable:
    """One row a rank, one column for each of `COLUMNS`.

    >>> table = RankTable(3)
    >>> for rank, forward in enumerate((1.0, 1.0, 3.0)):
    ...     table.put(rank, row_of({"step_s": 3.0, "forward_s": forward, "sync_s": 3.0 - forward}))
    >>> table.slowest(1)
    [SlowRank(rank=2, own_s=3.0, ratio=3.0, phase='forward', excess_s=2.0)]
    """

    def __init__(self, ranks: int) -> None:
        self.values = np.full((ranks, len(COLUMNS)), np.nan, np.float32)

    @classmethod
    def of(cls, values: np.ndarray) -> RankTable:
        """Table of values that another one had."""
        table = cls(0)
        table.values = values
        return table

    def put(self, rank: int, row: Sequence[float]) -> None:
        """Set a rank's row, in the order of `COLUMNS`."""
        self.values[rank] = row

    @property
    def ranks(self) -> int:
        """Number of ranks, whether heard of or not."""
        return len(self.values)

    @property
    def own_s(self) -> np.ndarray:
        """Seconds of a step in which each rank waits for no other; NaN where it was not heard of."""
        return self.values[:, _OWN].sum(axis=1, dtype=np.float64)

    def slowest(self, most: int) -> list[SlowRank]:
        """Return up to ``most`` ranks, the slowest first; none where a median is 0 or nobody was heard of."""
        own = self.own_s
        heard = np.flatnonzero(np.isfinite(own))
        if not heard.size or (median := float(np.median(own[heard]))) <= 0:
            return []
        usual = np.median(self.values[heard][:, _OWN], axis=0)
        order = heard[np.argsort(-own[heard], kind="stable")][:most]
        return [self._against(int(rank), float(own[rank]), median, usual) for rank in order]

    def _against(self, rank: int, own_s: float, median: float, usual: np.ndarray) -> SlowRank:
        excess = self.values[rank, _OWN] - usual
        worst = int(excess.argmax())
        phase = COLUMNS[_OWN[worst]].removesuffix("_s") if excess[worst] > 0 else ""
        return SlowRank(
            rank, round(own_s, 9), round(own_s / median, 6), phase, round(max(0.0, float(excess[worst])), 9)
        )

    def rows(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Return rows of ranks as JSON values; null where a rank was not heard of."""
        return [
            {"rank": rank, **{name: _plain(self.values[rank, at]) for name, at in PLACE.items()}}
            for rank in ranks
        ]


def _plain(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
