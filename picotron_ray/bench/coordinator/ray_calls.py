"""Cost of Ray's own part of a call: a real actor takes heartbeats as the coordinator does, and does nothing.

The callers are actors of other processes. CPU time of the called process is what counts: calls per second
follow from it on any machine, however busy it is. Of calls that the coordinator makes it is the caller's.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from picotron_ray.bench.coordinator.load import page
from picotron_ray.runtime.ray_cluster.ray_calls import answer

CALLERS = 2
CALLS = 1000  # of each caller, of one node's heartbeat
CALLS_TOGETHER = 250  # of each caller, of many nodes' heartbeats


class Target:
    """Actor that is called."""

    def __init__(self) -> None:
        self._calls = 0

    def heartbeats(self, caller: str, beats: dict[str, Any]) -> str:
        self._calls += 1
        return ""

    def used(self) -> tuple[int, float]:
        """Return calls so far and CPU seconds of the process."""
        return self._calls, time.process_time()


class Caller:
    """Actor that calls."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def call(self, calls: int, beats: dict[str, Any]) -> None:
        """Call so often, and wait until all calls were taken."""
        import ray

        ray.get([self._target.heartbeats.remote("caller", beats) for _ in range(calls)])

    def made(self, calls: int, beats: dict[str, Any]) -> float:
        """Make calls as the coordinator does, on a loop; returns CPU seconds of this process for each."""

        async def all_of_them() -> None:
            targets = [answer(self._target.heartbeats.remote("caller", beats)) for _ in range(calls)]
            await asyncio.gather(*targets)

        began_s = time.process_time()
        asyncio.run(all_of_them())
        return (time.process_time() - began_s) / calls


def measure(workers_each: int, nodes_together: int) -> dict[str, float]:
    """Measure calls of one node's heartbeat, and of ``nodes_together`` nodes'; needs a connected Ray."""
    import ray

    options: dict[str, Any] = {"num_cpus": 0}
    actor: Any = ray.remote(Target).options(**options, max_concurrency=32)
    target = actor.remote()
    caller: Any = ray.remote(Caller).options(**options)
    callers = [caller.remote(target) for _ in range(CALLERS)]
    many = {
        f"node{n}": [page(f"w{n}-{i}", None, i, 1, 0.1 * i) for i in range(workers_each)]
        for n in range(nodes_together)
    }
    one = {"node0": many["node0"]}

    def rates(calls: int, beats: dict[str, Any]) -> tuple[float, float]:
        before, used_s = ray.get(target.used.remote())
        began_s = time.monotonic()
        ray.get([each.call.remote(calls, beats) for each in callers])
        wall_s = time.monotonic() - began_s
        after, now_used_s = ray.get(target.used.remote())
        return (after - before) / wall_s, (now_used_s - used_s) / (after - before)

    rates(20, one)  # connections are made
    calls_per_s, call_cpu_s = rates(CALLS, one)
    ray.get(callers[0].made.remote(20, {}))
    made_cpu_s = ray.get(callers[0].made.remote(CALLS, {}))
    _, together_cpu_s = rates(CALLS_TOGETHER, many)
    for each in (*callers, target):
        ray.kill(each)
    return {
        "calls_per_s": calls_per_s,
        "call_cpu_s": call_cpu_s,
        "made_cpu_s": made_cpu_s,
        "nodes_together": float(nodes_together),
        "together_cpu_s": together_cpu_s,
    }
