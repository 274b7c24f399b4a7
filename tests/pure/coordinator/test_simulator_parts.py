"""Parts of the simulation on their own: storage with its complaints, a coordinator's shell, a worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.nodes import SimNode, SimWorker
from picotron_ray.coordinator.simulator.shell import Shell
from picotron_ray.coordinator.simulator.slots import SimSlot, complete
from picotron_ray.coordinator.simulator.storage import SimStorage, digest_of
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.coordinator.states import MachineState
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import choose_dp, job

A, B = m.GenerationId(1, 1), m.GenerationId(1, 2)
TWO = (m.Member("w1", "n1"), m.Member("w2", "n1"))
START = m.GenerationSpec(A, TWO, Layout(dp=2), m.Source("init"), "start")


def part(index: int, history: Any = ((A, 0, 7),), count: int = 2) -> SimSlot:
    info = m.SlotInfo("n1", f"w{index}.7", A, 7, index, (m.Fragment(0, index, count),))
    return SimSlot(info, history)


@pytest.fixture
def storage() -> SimStorage:
    made = SimStorage()
    assert (made.claim(), made.claim()) == (1, 2)
    return made


def test_a_log_numbers_its_entries_and_fences_older_terms(storage: SimStorage) -> None:
    assert storage.append_generation(2, START) == m.Appended("generation", A, 0, 3)
    assert storage.append_generation(2, START) == m.Appended("generation", A, 0, 3), "the same again"
    assert storage.append_generation(1, START) == m.Appended("generation", A, 0, fenced=True)
    assert storage.claim() == 3
    assert storage.append_generation(2, START) == m.Appended("generation", A, 0, fenced=True)
    assert (storage.generations(), storage.commits(), storage.complaints) == ((START,), (), [])


def test_a_commit_needs_its_generation_and_all_parts_of_one_history(storage: SimStorage) -> None:
    commit = m.AppendCommit(A, 7, ("n1", "n2"))
    assert storage.append_commit(2, commit) == m.Appended("commit", A, 7, error="no generation")
    storage.append_generation(2, START)
    assert storage.append_commit(2, commit) == m.Appended("commit", A, 7, error="incomplete")
    storage.parts[A, 7] = {"n1": [part(0)], "n3": [part(1)]}
    assert storage.append_commit(2, commit) == m.Appended("commit", A, 7, error="incomplete")
    storage.parts[A, 7]["n2"] = [part(1)]
    key = "manifests/7-1.1"
    assert storage.append_commit(2, commit) == m.Appended("commit", A, 7, 4, key, digest=digest_of(key))
    assert storage.commits() == (m.Commit(7, A, key, 4, digest_of(key)),)
    assert storage.histories == {key: ((A, 0, 7),)}
    assert storage.complaints == [
        "commit of 1.1 at 7 before its generation's entry",
        "commit of 1.1 at 7 does not cover the state",
        "commit of 1.1 at 7 does not cover the state",
    ]
    storage.parts[A, 7]["n2"] = [part(1, ((A, 0, 6), (B, 6, 7)))]
    storage.append_commit(2, commit)
    assert storage.complaints[3:] == ["commit of 1.1 at 7 mixes histories"]


def test_a_state_is_complete_with_all_parts_of_one_count() -> None:
    def held(*parts: SimSlot) -> bool:
        return complete([slot.info for slot in parts], Layout(dp=2))

    assert held(part(0), part(1))
    assert not held(part(0), part(1, count=3))
    assert not held(part(1))
    assert not held()
    assert not complete([part(0).info, part(1).info], Layout(tp=2)), "of the other group there is nothing"


@pytest.fixture
def shell() -> Any:
    """A coordinator that has begun, whose machine only listens."""
    checks = Checks(Coverage())
    sim = Sim(1, job(), choose_dp, checks)
    checks.sim = sim
    made = sim.shell = Shell(sim)
    memory = SimpleNamespace(term=1, quiet=True, transitions=[], state=MachineState.NEW, stop_requested=False)
    handled: list[m.Event] = []
    made.machine = SimpleNamespace(
        memory=memory, wake_at=None, handled=handled, handle=lambda event, now: handled.append(event) or []
    )
    return made


def test_a_shell_notes_what_it_hears(shell: Any) -> None:
    commit = m.Appended("commit", A, 7, 4, "manifests/7-1.1")
    shell._asked = {"n1": 1, "n2": 2}
    for event in (
        m.Inventory("n1", 1, ()),
        m.Inventory("n2", 1, ()),  # of an earlier question
        commit,
        m.Appended("commit", A, 8),
        m.Appended("generation", A, 0, 3),
    ):
        shell.deliver(event)
    assert shell.heard == {"n1"}
    assert shell.commits == [m.Commit(7, A, "manifests/7-1.1", 4)]
    assert (len(shell.machine.handled), shell.sim.events) == (5, 5)


def test_a_shell_hears_nothing_before_it_began_or_after_its_death(shell: Any) -> None:
    shell.machine.memory.term = 0
    shell.deliver(m.Tick())
    assert (shell.machine.handled, shell.sim.events) == ([], 0)
    begin = m.Begin(1, (), (), None, (), ())
    shell.deliver(begin)
    assert shell.machine.handled == [begin]
    shell.machine.memory.term = 1
    shell.die()
    shell.deliver(m.Tick())
    assert shell.machine.handled == [begin]


def test_a_stopped_shell_handles_afterwards_what_came_meanwhile(shell: Any) -> None:
    sim = shell.sim
    shell.pause(3.0)
    events = [m.NodeLost(name, "gone") for name in "abc"]
    for event in events:
        shell.deliver(event)
    assert shell.machine.handled == []
    sim.now = 3.0
    shell.deliver(m.Tick())
    assert shell.machine.handled == [m.Tick()], "no longer stopped"
    shell._resume()
    assert shell.machine.handled == [m.Tick(), *events]
    shell._resume()
    assert len(shell.machine.handled) == 4


def test_the_present_coordinator_alone_ends_the_run(shell: Any) -> None:
    shell.sim.shell = None
    shell.finish(m.Finish("finished", ""))
    assert (shell.finished.status, shell.sim.over) == ("finished", False)
    shell.sim.shell = shell
    shell.finish(m.Finish("finished", ""))
    assert shell.sim.over


def test_a_worker_in_two_generations_is_noticed(shell: Any) -> None:
    sim = shell.sim
    node = sim.nodes["n1"] = SimNode(sim, "n1", 2)
    worker = node.workers["w1"] = SimWorker("w1", node)
    node.workers["w2"] = SimWorker("w2", node)
    worker.run(START, False)
    worker.run(START, False)
    assert (sim.failures, worker.last, worker.generation.spec) == ([], A, START)
    second = m.GenerationSpec(B, TWO, Layout(dp=2), m.Source("init"), "next")
    worker.run(second, False)
    assert sim.failures == ["at 0.000 s: w1 was told to run 1.2 while in 1.1"]
    sim.failures.clear()
    worker.hung = True
    worker.run(m.GenerationSpec(m.GenerationId(1, 3), TWO, Layout(dp=2), m.Source("init"), "next"), False)
    assert sim.failures == []


def test_a_run_that_does_not_end_is_noticed(shell: Any) -> None:
    sim = shell.sim
    times: list[float] = []
    for at in (40.0, 40.5):
        sim.after(at, times.append, at)
    sim.quiet_at = 30.0
    sim.run(10.0)
    assert (times, sim.failures) == ([40.0], ["at 40.000 s: no end 10 s after the last fault"])
    fresh = m.GenerationSpec(A, TWO[:1], Layout(), m.Source("init"), "other")
    sim.generation(START)
    sim.failures.clear()
    sim.generation(fresh)
    assert sim.failures == ["at 40.000 s: generation 1.1 was used twice"]
