"""The fake cluster before the real coordinator shell, small; `bench coordinator` is the large form."""

from __future__ import annotations

import pytest

from picotron_ray.bench.coordinator import bench, report
from picotron_ray.runtime.coordinator.beat_groups import FEWEST

NODES, EACH = FEWEST + 26, 2


@pytest.mark.timeout(120)
def test_a_coordinator_answers_losses_at_size_with_little_of_a_core() -> None:
    said: list[str] = []
    found = bench.bench(NODES, EACH, 3.0, said.append, with_calls=False)
    assert (found["nodes"], found["errors"]) == (NODES - 1, [])
    assert len(found["losses"]) == bench.LOSSES + 1
    assert all(0 < loss["ordered_s"] < loss["launched_s"] for loss in found["losses"])
    assert found["calls_per_s"] < NODES / 2, "heartbeats travel together"
    assert found["handled"]["Heartbeat"] >= 2 * NODES
    assert report.verdicts(found) == []
    assert f"bring the heartbeats of {NODES - 1} nodes" in "\n".join(report.lines(found))


def test_what_is_beyond_its_limit_is_told() -> None:
    loss = {"decided_s": 0.06, "ordered_s": 0.1, "launched_s": 0.2}
    calls = {"calls_per_s": 3000.0, "call_cpu_s": 0.0003, "together_cpu_s": 0.002}
    found = {
        "machine": {"cores": 2, "processor": "a", "memory_gib": 1}, "nodes": 2048, "workers": 16384,
        "wall_s": 600.0, "cpu_share": 0.4, "calls_per_s": 96.0, "memory_bytes": [100, 100, 120],
        "losses": [loss], "calls": calls, "errors": ["x"],
    }  # fmt: skip
    assert report.core_share(found) == pytest.approx(0.592)
    assert report.verdicts(found) == [
        "59% of a core, more than 50%", "a loss is decided in 60 ms, more than 50 ms",
        "memory grew by 20% in the second half", "error: x",
    ]  # fmt: skip
    assert sum("BEYOND" in line for line in report.lines(found)) == 4
    calm = {**found, "cpu_share": 0.1, "memory_bytes": [100, 100, 101], "errors": [], "calls": None}
    assert report.verdicts({**calm, "losses": [{**loss, "decided_s": 0.04}]}) == []
