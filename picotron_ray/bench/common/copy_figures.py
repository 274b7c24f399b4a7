"""Copies of snapshots by the device's events. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median


def copy_figures(times: Sequence[Mapping[str, float]]) -> dict[str, float] | None:
    """Medians of copies by the device's events, and the share that ran beside the step; None without any.

    >>> copy_figures([{"copy_s": 0.2, "exposed_s": 0.05, "host_wait_s": 0.0}])["overlap"]
    0.75
    """
    if not times:
        return None
    found = {name: median(each[name] for each in times) for name in times[0]}
    return found | {"overlap": 1 - found["exposed_s"] / found["copy_s"]}
