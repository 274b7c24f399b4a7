"""Time limit of a launch by the wall clock, as the machine hears of it: seconds that are left."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from picotron_ray.config.schema.service import ClusterConfig


def left(cluster: ClusterConfig, launched_s: float, now_s: float) -> dict[str, Any]:
    """Fields of a term's first event; none where the launch has no limit.

    Args:
        launched_s: when the launch began; like ``now_s`` in seconds since the epoch.
    """
    ends = {}
    if cluster.max_wall_s is not None:
        ends["cluster.max_wall_s"] = launched_s + cluster.max_wall_s
    if cluster.deadline is not None:
        ends["cluster.deadline"] = datetime.fromisoformat(cluster.deadline).timestamp()
    if not ends:
        return {}
    key = min(ends, key=ends.__getitem__)
    return {"left_s": ends[key] - now_s, "limit": key}
