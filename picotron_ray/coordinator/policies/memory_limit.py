"""Memory limits: a layout that ran out of memory is struck, and with it all that need as much.

The planner only estimates memory, so a layout may not fit although its estimate does. What ran out on devices
of one size is not tried there again: neither that layout nor any other whose estimate is not clearly smaller,
micro-batch and recomputation included. Each strike lowers the limit further than the one before, so a handful
of them is enough where the estimate is far off.
"""

from __future__ import annotations

from collections.abc import Iterable

from picotron_ray.coordinator.messages import Strike

LEAST_DROP = 0.05  # the next estimate is smaller by this share at least ...
DROP_FACTOR = 2.0  # ... times this for each strike before it on devices of that size
MOST_DROP = 0.4


def limit_of(struck: Iterable[Strike], device_bytes: int) -> int:
    """Largest estimate that devices of this size may be given, in bytes; 0: no limit is known.

    What ran out on a larger device would run out on this one too. Devices of unknown size (0) know of each
    other alone.
    """
    known = [s for s in struck if s.device_bytes == device_bytes or 0 < device_bytes < s.device_bytes]
    return min((s.limit_bytes for s in known), default=0)


def together(*known: Iterable[Strike]) -> tuple[Strike, ...]:
    """Merge what several sources know of: for devices of each size the strike with the lowest limit."""
    lowest: dict[int, Strike] = {}
    for each in (one for some in known for one in some):
        before = lowest.get(each.device_bytes)
        if before is None or each.limit_bytes < before.limit_bytes:
            lowest[each.device_bytes] = each
    return tuple(lowest.values())


def strike(
    struck: tuple[Strike, ...], device_bytes: int, estimate_bytes: float, layout: str
) -> tuple[Strike, ...]:
    """Strike a layout on devices of one size.

    Args:
        estimate_bytes: what the layout was thought to need per worker.
    """
    before = next((s for s in struck if s.device_bytes == device_bytes), None)
    if before is not None and before.limit_bytes < estimate_bytes:  # heard of twice, or late
        return struck
    drop = LEAST_DROP if before is None else min(MOST_DROP, DROP_FACTOR * before.drop)
    limit = max(1, int(estimate_bytes * (1 - drop)))
    others = tuple(s for s in struck if s.device_bytes != device_bytes)
    return (*others, Strike(device_bytes, limit, layout, drop))
