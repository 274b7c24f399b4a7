"""Newest operations of a worker, the groups that they are of, and the counters of their connections."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from picotron_ray.comm.link_counters import link_counters
from picotron_ray.comm.operation_record import OPERATIONS, place_of_frames
from picotron_ray.comm.torch_groups import recorded_operations

TOLD = (
    *("process_group", "collective_seq_id", "profiling_name", "is_p2p", "input_sizes", "input_dtypes"),
    *("output_sizes", "output_dtypes", "state", "retired", "time_created_ns"),
    "time_discovered_completed_ns",
)
"""Of an entry of torch's recorder, what is told."""


def newest_operations(places: bool = True) -> bytes:
    """Return what this process keeps of its operations, in JSON; no entries where it records nothing.

    ``entries`` are those of torch's flight recorder, ``messages`` those of gloo (`comm.operation_record`).

    Args:
        places: where each was called, too: torch takes seconds for the first time.
    """
    found = {
        "entries": [_entry(each) for each in recorded_operations(places)],
        "messages": OPERATIONS.messages(),
        "groups": OPERATIONS.groups(),
        "connections": link_counters(OPERATIONS.is_ours),
        "since_ns": OPERATIONS.since_ns,
        "at_ns": time.time_ns(),
        "recorded": bool(OPERATIONS.most),
        "places": places,
    }
    return json.dumps(found, separators=(",", ":")).encode()


def _entry(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce an entry to what is told of it."""
    place = place_of_frames(recorded.get("frames", ()))
    return {key: recorded[key] for key in TOLD} | ({"place": place} if place else {})
