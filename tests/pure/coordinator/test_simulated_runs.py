"""Simulated runs go as they went when they were kept: each event, each command, and all at the same time.

``PICOTRON_KEEP_LOGS=1`` writes what the present machine and simulator do: do that, and say why, where the
behaviour of one of them was changed on purpose. The seeds reach, together, what few others do.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.replay import event_line
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.faults import FAULTS
from picotron_ray.coordinator.simulator.run import simulate
from tests.support.runs.replays import KEEP

KEPT = Path(__file__).with_name("simulated_runs.json")
RUNS: dict[str, dict[str, Any]] = json.loads(KEPT.read_text())


def _run(seed: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The report of a seed, and a digest of all that its coordinators heard and ordered, and went through."""
    digest, real = hashlib.blake2b(digest_size=8), Machine.handle

    def handle(self: Machine, event: m.Event, now: float) -> list[m.Command]:
        commands = real(self, event, now)
        digest.update(event_line(now, event, commands).encode())
        return commands

    patch.setattr(Machine, "handle", handle)
    coverage = Coverage()
    report = simulate(seed, coverage)
    digest.update(coverage.table(list(FAULTS)).encode())
    return {
        "events": report.events,
        "faults": " ".join(report.faults),
        "generations": report.generations,
        "virtual_s": report.virtual_s,
        "failures": list(report.failures),
        "digest": digest.hexdigest(),
    }


@pytest.mark.parametrize("seed", RUNS)
def test_a_kept_seed_runs_as_it_did(seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = _run(int(seed), monkeypatch)
    if KEEP:
        kept = json.loads(KEPT.read_text()) | {seed: found}
        lines = (f'"{number}": {json.dumps(run)}' for number, run in kept.items())
        KEPT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        pytest.skip("rewritten")
    assert found == RUNS[seed]
