"""Nodes of a run with their workers, as operators look at them."""

from __future__ import annotations

from typing import Any

from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.policies.membership import RosterNode


def node_rows(memory: MachineMemory) -> list[dict[str, Any]]:
    """List nodes with their workers, also those that take no part, and why.

    ``state`` is ready, draining, barred, refused or given back; ``left_s`` a draining node's time, None where
    no deadline was given; ``silent_s`` the time since its last heartbeat.
    """
    ranks = {member.worker: rank for rank, member in enumerate(memory.spec.members)} if memory.spec else {}
    rows = [_row(memory, node, ranks) for node in memory.roster.nodes.values()]
    away = {**dict.fromkeys(memory.freed, ""), **memory.refused}
    for name, why in sorted(away.items()):
        if name not in memory.roster.nodes:
            gone = RosterNode(name, 0, memory.now)
            said = {"state": "refused" if why else "given back", "why": why}
            rows.append({**_row(memory, gone, ranks), **said})
    return rows


def _row(memory: MachineMemory, node: RosterNode, ranks: dict[str, int]) -> dict[str, Any]:
    now = memory.now + memory.slept_s
    workers = [
        {"worker": w.name, "state": w.state, "rank": ranks.get(w.name) if w.state == "busy" else None}
        for w in sorted(
            memory.roster.workers.on(node.name), key=lambda w: (ranks.get(w.name, len(ranks)), w.name)
        )
    ]
    return {
        "node": node.name,
        "state": "draining" if node.draining else "barred" if node.barred else "ready",
        "capacity": node.capacity,
        "workers": workers,
        "left_s": node.drain_deadline - now if node.draining and node.drain_deadline else None,
        "silent_s": max(0.0, memory.now - node.last_seen),
        "domain": node.domain,
        "hardware": node.hardware,
        "device_bytes": node.device_bytes,
        "why": "",
    }
