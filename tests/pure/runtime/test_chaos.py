"""Scripted faults: the registry and the config name the same ones, and each strikes once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, get_args

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.config.schema.chaos import FAULT_TARGETS, ChaosFault, FaultName
from picotron_ray.runtime.chaos.claims import claim
from picotron_ray.runtime.chaos.coordinator_chaos import CoordinatorChaos
from picotron_ray.runtime.chaos.faults import FAULTS, LastingFault, NodeFault, ProcessFault
from picotron_ray.runtime.chaos.worker_chaos import WorkerChaos


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Strikes, in order; ``kill`` and ``remove-node`` only note theirs."""
    notes: list[Any] = []

    class NotedKill(ProcessFault, name="noted kill"):
        def strike(self) -> None:
            notes.append("kill")

    class NotedRemoval(NodeFault, name="noted removal"):
        def strike(self, nodes: Any, index: int) -> None:
            notes.append((nodes, index))

    monkeypatch.setitem(FAULTS, "kill", FAULTS.pop("noted kill"))
    monkeypatch.setitem(FAULTS, "remove-node", FAULTS.pop("noted removal"))
    return notes


def test_the_config_names_exactly_the_faults_that_there_are() -> None:
    assert set(FAULTS) == set(get_args(FaultName)) == set(FAULT_TARGETS)
    assert {name: fault.targets for name, fault in FAULTS.items()} == FAULT_TARGETS


def test_a_fault_is_claimed_once_in_the_life_of_a_run(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path), "run")
    assert [claim(storage, 0), claim(storage, 1), claim(storage, 0)] == [True, True, False]


def test_a_worker_is_struck_at_its_rank_step_and_phase(tmp_path: Path, struck: list[Any]) -> None:
    fault = ChaosFault(fault="kill", target="worker:1", step=5, phase="reduce")
    chaos = WorkerChaos((fault,), lambda: LocalStorage(str(tmp_path), "run"))
    for rank, step, phase in ((0, 5, "reduce"), (1, 4, "reduce"), (1, 5, "forward")):
        chaos.rank = rank
        chaos(step, phase)
    assert struck == []
    chaos(6, "reduce")
    chaos(7, "reduce")
    again = WorkerChaos((fault,), lambda: LocalStorage(str(tmp_path), "run"))
    again.rank = 1
    again(6, "reduce")
    assert struck == ["kill"]


def test_a_slow_worker_is_told_how_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []

    class NotedSlow(LastingFault, name="noted slow"):
        def strike(self, row_s: float) -> None:
            told.append(row_s)

    monkeypatch.setitem(FAULTS, "slow", FAULTS.pop("noted slow"))
    faults = tuple(
        ChaosFault(fault="slow", target="worker:0", step=at, row_s=s) for at, s in ((2, 0.5), (4, 0))
    )
    chaos = WorkerChaos(faults, lambda: LocalStorage(str(tmp_path), "run"))
    chaos.rank = 0
    for step in range(1, 6):
        chaos(step, "forward")
    assert told == [0.5, 0]


def test_the_coordinator_strikes_nodes_and_itself(struck: list[Any]) -> None:
    faults = (
        ChaosFault(fault="remove-node", target="node:2", step=3),
        ChaosFault(fault="kill", target="coordinator", step=4),
        ChaosFault(fault="kill", target="coordinator", step=6, phase="commit"),
        ChaosFault(fault="kill", target="worker:0", step=1),
    )
    claimed: set[int] = set()
    tasks: list[Coroutine[Any, Any, None]] = []

    def first(index: int) -> bool:
        return index not in claimed and not claimed.add(index)

    class NoNodes:
        def remove_node(self, index: int) -> None:
            raise AssertionError("noted instead")

    nodes = NoNodes()
    chaos = CoordinatorChaos(faults, first, nodes, tasks.append)
    for step in (2, 3, 3, 5):
        chaos.reached(step)
    for task in tasks:
        asyncio.run(task)
    assert struck == [(nodes, 2), "kill"]
    chaos.committing(5)
    chaos.committing(6)
    chaos.committing(7)
    assert struck == [(nodes, 2), "kill", "kill"]
    assert claimed == {0, 1, 2}


def test_kill_and_stop_are_real_signals() -> None:
    program = "import sys; from picotron_ray.runtime.chaos.faults import FAULTS; FAULTS[sys.argv[1]].strike()"
    processes = [subprocess.Popen([sys.executable, "-c", program, name]) for name in ("kill", "stop")]
    _, stopped = os.waitpid(processes[1].pid, os.WUNTRACED)
    processes[1].kill()
    processes[1].wait()
    assert processes[0].wait() == -signal.SIGKILL
    assert os.WIFSTOPPED(stopped)
