"""The operations of a rank in their order, as torch and `comm.operation_record` keep them."""

from __future__ import annotations

import json

from picotron_ray.comm.operation_record import OPERATIONS
from picotron_ray.runtime.worker.newest_operations import newest_operations
from picotron_ray.train.dry_run.call_order import Call

MOST = 20_000
"""Operations of a generation."""
TYPES = {"Float": "float32", "BFloat16": "bfloat16", "Double": "float64", "Long": "int64", "Byte": "uint8"}


def calls() -> list[Call]:
    """This rank's operations of the generation, oldest first; `OPERATIONS.keep` was called before it."""
    found = json.loads(newest_operations(places=False))
    groups = {each["name"]: (each["axis"], tuple(each["ranks"])) for each in found["groups"]}
    timed = [
        (
            each["time_created_ns"],
            each["process_group"][0],
            each["profiling_name"],
            each["input_sizes"],
            False,
            "/".join(sorted({TYPES.get(dtype, dtype) for dtype in each["input_dtypes"]})),
            -1,
            1,
        )
        for each in found["entries"]
        if each["time_created_ns"] > found["since_ns"]
    ]
    timed += [
        (
            each["issued_ns"],
            each["group"],
            each["kind"],
            each["sizes"],
            True,
            each["dtype"],
            groups[each["group"]][1][each["peer"]],
            each["batch"],
        )
        for each in found["messages"]
    ]
    assert len(timed) < MOST, "some are lost"
    return [
        Call(
            *groups[group],
            kind.removeprefix("gloo:"),
            json.dumps(sizes),
            message,
            dtype,
            peer=peer,
            batch=batch,
        )
        for _, group, kind, sizes, message, dtype, peer, batch in sorted(timed, key=lambda each: each[0])
    ]


def keep_calls() -> None:
    """Record the operations of the generations that begin from here on."""
    OPERATIONS.keep(MOST)
