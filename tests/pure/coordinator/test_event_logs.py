"""Event logs saved by tests on a real cluster still replay to identical commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from picotron_ray.coordinator.replay import replay
from tests.support.runs.replays import KEEP, KEPT, planner, rewritten

LOGS = sorted(KEPT.glob("*.jsonl"))


def test_logs_of_real_runs_are_kept() -> None:
    assert len(LOGS) >= 2
    kinds = {json.loads(line)["event"]["type"] for log in LOGS for line in log.read_text().splitlines()[1:]}
    assert {"Begin", "WorkerExited", "Outcome", "Inventory", "SnapshotSealed", "Appended"} <= kinds


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_a_kept_log_replays(log: Path) -> None:
    lines = log.read_text().splitlines()
    if KEEP:
        log.write_text("\n".join(rewritten(lines)) + "\n")
        pytest.skip("rewritten")
    found = replay(lines, planner)
    assert found.difference is None, str(found.difference)
    assert found.events == len(lines) - 1
