"""Traces of several ranks as one, on the clock of the first: Chrome's trace format, which Perfetto opens.

Each rank becomes a process of its own with its number as its id. Times become microseconds since the first
event. Memory becomes a counter beside each rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from picotron_ray.debug.clock_offsets import Offset

STRIDE = 100
"""Processes of one rank in the trace: the host's, and the devices' that the profiler tells apart."""
FLOWS = 1 << 32
"""Arrows of a trace have numbers below this; each rank gets its own range."""
Event = dict[str, Any]


class RankTrace(NamedTuple):
    """Trace of one rank, as its profiler wrote it."""

    rank: int
    title: str
    trace: Mapping[str, Any]
    offset: Offset = Offset(0.0, 0.0)


def merged(traces: Iterable[RankTrace], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return one trace of all.

    Args:
        about: what the trace says of itself.
    """
    events: list[Event] = []
    for one in traces:
        events += _of_rank(one)
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    return {"displayTimeUnit": "ms", "otherData": dict(about), "traceEvents": events}


def _of_rank(one: RankTrace) -> Iterator[Event]:
    """Events of one rank, at microseconds of the common clock."""
    shift_us = (one.trace.get("baseTimeNanoseconds", 0) - one.offset.ahead_ns) / 1000
    places: dict[str, int] = {}
    for event in one.trace.get("traceEvents", ()):
        if event.get("ph") == "M":
            continue
        pid = one.rank * STRIDE + places.setdefault(str(event.get("pid")), len(places))
        moved = {**event, "pid": pid}
        if "ts" in event:
            moved["ts"] = event["ts"] + shift_us
        if event.get("ph") in "stf" and isinstance(event.get("id"), int):
            moved["id"] = one.rank * FLOWS + event["id"]
        yield from _counted(moved)
    for original, place in places.items():
        pid = one.rank * STRIDE + place
        name = f"{one.title}: {original}"
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}}


def _counted(event: Event) -> Iterator[Event]:
    """The event; one that tells of memory as a point of a curve."""
    values = event.get("args", {})
    if event.get("name") == "[memory]" and "Total Allocated" in values:
        device = "host" if values.get("Device Type") == 0 else f"device {values.get('Device Id')}"
        curve = {"allocated": values["Total Allocated"], "reserved": values.get("Total Reserved", 0)}
        at = {"ts": event["ts"], "pid": event["pid"]}
        yield {"ph": "C", "name": f"memory of {device}", "args": curve, **at}
        return
    yield event
