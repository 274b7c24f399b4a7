"""The fake cluster before the real coordinator shell, small; `bench coordinator` is the large form."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from picotron_ray.bench.coordinator import bench, report
from picotron_ray.coordinator import event_handlers
from picotron_ray.coordinator import messages as m
from picotron_ray.runtime.coordinator.beat_groups import FEWEST

NODES, EACH = FEWEST + 26, 2


@pytest.mark.timeout(120)
def test_a_coordinator_answers_losses_at_size_with_little_of_a_core() -> None:
    said: list[str] = []
    found = bench.bench(NODES, EACH, 3.0, said.append, with_calls=False)
    assert (found["nodes"], found["errors"]) == (NODES - 1, [])
    assert len(found["losses"]) == bench.LOSSES + 1
    assert all(0 < loss["ordered_s"] < loss["launched_s"] <= loss["called_s"] for loss in found["losses"])
    most = 6 * NODES  # to leave, the ends, what they hold, the next generation: a call each for a node
    assert all(0 < loss["calls"] < most for loss in found["losses"])
    assert found["calls_per_s"] < NODES / 2, "heartbeats travel together"
    assert found["handled"]["Heartbeat"] >= 2 * NODES
    assert report.verdicts(found) == []
    printed = report.lines(found)
    assert found["machine"]["processor"] in printed[0]
    assert printed[-1].startswith("node ")
    assert [line for line in said if line.startswith("worker ")] == printed[-1 - bench.LOSSES : -1]


def test_an_error_of_the_coordinator_itself_ends_the_benchmark_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Elsewhere its process exits, and Ray starts it again; here that would be the benchmark's own."""

    def broken(memory: Any, event: Any) -> None:
        raise AssertionError("no transition")

    monkeypatch.setitem(event_handlers.HANDLERS, m.WorkerExited, broken)
    with pytest.raises(bench.CoordinatorError, match="the machine: AssertionError") as caught:
        bench.bench(4, 2, 1.0, lambda line: None, with_calls=False)
    assert caught.value.exit_code == 1
    assert logging.getLogger("picotron_ray").isEnabledFor(logging.WARNING), "its quiet ends with it"


def test_checkpoints_are_committed_and_losses_survived_before_the_fake_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "CHECKPOINT_S", 1.0)
    monkeypatch.setattr(bench, "LOSSES", 0)
    found = bench.bench(4, 2, 6.0, lambda line: None, with_calls=False)
    assert (found["nodes"], found["errors"]) == (3, [])
    assert found["commits"] >= 1


def test_what_is_beyond_its_limit_is_told() -> None:
    loss = {"decided_s": 0.06, "ordered_s": 0.1, "told_s": 0.12, "chosen_s": 0.08, "launched_s": 0.2,
        "called_s": 0.3, "calls": 40}  # fmt: skip
    calls = {"calls_per_s": 3000.0, "call_cpu_s": 0.0003, "together_cpu_s": 0.002, "made_cpu_s": 0.0004}
    found = {
        "machine": {"cores": 2, "processor": "a", "memory_gib": 1}, "nodes": 2048, "workers": 16384,
        "wall_s": 600.0, "cpu_share": 0.4, "calls_per_s": 96.0, "memory_bytes": [100, 100, 120],
        "losses": [loss], "calls": calls, "errors": ["x"],
        "late_s": 0.1, "commits": 20, "loop_pause_s": 0.05, "garbage_pause_s": 0.01,
    }  # fmt: skip
    assert report.core_share(found) == pytest.approx(0.592)
    assert report.verdicts(found) == [
        "59% of a core, more than 50%", "a loss is decided in 60 ms, more than 50 ms",
        "memory grew by 20% in the second half", "error: x",
    ]  # fmt: skip
    assert sum("BEYOND" in line for line in report.lines(found)) == 4
    calm = {**found, "cpu_share": 0.1, "memory_bytes": [100, 100, 101], "errors": [], "calls": None}
    assert report.verdicts({**calm, "losses": [{**loss, "decided_s": 0.04}]}) == []
