"""Watch over the process that a run is tied to (``ray_cluster.owner_process``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.ray_cluster import owner_process


async def end_with(process: dict[str, Any], record: RunRecord, dispatch: Callable[[m.Event], None]) -> None:
    """Wait for the end of the process that a run is tied to; then stop the run with a commit."""
    while not await asyncio.to_thread(owner_process.is_gone, process):
        await asyncio.sleep(owner_process.POLL_S)
    record.note("warning", "orphaned", "the process that asked for this run is gone: stopping it")
    while not record.status(0)["done"]:
        dispatch(m.UserRequest("stop"))
        await asyncio.sleep(owner_process.POLL_S)
