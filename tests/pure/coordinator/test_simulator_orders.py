"""Rules of the simulator on what must be known before an order: what breaks each, and what just does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.policies.worker_index import RosterWorker
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.shell import Shell
from picotron_ray.coordinator.simulator.slots import SimSlot
from picotron_ray.coordinator.simulator.world import SETTLED_S, Sim
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import Remedy
from tests.support.runs.coordinator_world import choose_dp, job
from tests.support.runs.quiet_simulation import SPEC, A

B = m.GenerationId(1, 2)
NEXT = replace(SPEC, id=B, source=m.Source("slots", 5, A), lineage=(m.Link(A, 5),))


class Bench:
    """A coordinator whose machine is told by hand what it believes."""

    def __init__(self) -> None:
        checks = Checks(Coverage())
        self.sim = checks.sim = Sim(1, job(), choose_dp, checks)
        self.sim.now = 100.0
        self.node = self.sim.add_node(3, told=False)
        self.shell = self.sim.shell = Shell(self.sim)
        self.memory = self.shell.machine.memory
        self.memory.roster.join("n1", 3, 100.0)
        self.memory.now, self.memory.spec, self.shell.newest = 100.0, SPEC, SPEC
        checks.specs |= {A: SPEC, B: NEXT}
        self.shell.machine = Machine(job())
        self.shell.machine.memory = self.memory

    def worker(self, state: Any) -> None:
        self.memory.roster.workers["w1"] = RosterWorker("w1", "n1", state, self.memory.now)

    def handled(self, event: m.Event, *commands: m.Command) -> list[str]:
        """Return what the orders break that follow from an event."""
        self.sim.checks.orders.handled(self.shell, event, commands)  # type: ignore[attr-defined]
        found, self.sim.failures = self.sim.failures, []
        return [text.split(" s: ")[1] for text in found]

    def collects(self) -> None:
        self.memory.transitions = [(MachineState.RUNNING, MachineState.COLLECTING)]
        assert self.handled(m.Tick(), m.CollectInventory("n1", 1)) == []
        self.memory.transitions = []

    def launches(self) -> list[str]:
        return self.handled(m.Tick(), m.RunGeneration(NEXT))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_launch_awaits_the_answer_of_every_node_to_the_newest_question(bench: Bench) -> None:
    assert bench.launches() == ["1.2 is launched, and n1 was not asked what it holds"]
    bench.collects()
    early = ["1.2 is launched before n1 has answered"]
    assert bench.launches() == early
    bench.handled(m.Inventory("n1", 0, ()))
    assert bench.launches() == early, "it answered an older one"
    bench.handled(m.Inventory("n1", 1, ()))
    assert bench.launches() == []
    bench.handled(m.Tick(), m.CollectInventory("n1", 2))
    assert bench.launches() == early, "it was asked again since"
    bench.memory.now += bench.memory.job.elastic.interrupt_timeout_s - 1e-9  # as sums of times are
    assert bench.launches() == [], "asked in vain"
    assert bench.handled(m.Tick(), *[m.CollectInventory("n1", 2)] * 2) == []
    assert bench.handled(m.Tick(), m.CollectInventory("n1", 2)) == ["n1 is asked for ever what it holds"]


def test_a_launch_awaits_who_may_still_write_and_a_commit_for_a_while(bench: Bench) -> None:
    bench.collects()
    bench.handled(m.Inventory("n1", 1, ()))
    bench.worker("dying")
    bench.node.start_worker("w1")
    assert bench.handled(m.Tick(), m.KillWorker("w1", "why")) == []
    assert bench.launches() == [], "it was in no generation"
    bench.node.workers["w1"].generation = bench.sim.generation(SPEC)
    bench.handled(m.Tick(), m.KillWorker("w1", "why"))
    assert bench.launches() == ["1.2 is launched while w1 dies, which may still write"]
    bench.handled(m.WorkerExited("w1", "killed"))
    assert bench.launches() == []
    bench.handled(m.Tick(), m.AppendCommit(A, 6, ("n1",)))
    assert bench.launches() == ["1.2 is launched before the commit of step 6 is through"]
    bench.memory.remedy = Remedy.COMMIT
    assert bench.launches() == []
    bench.memory.remedy, bench.memory.now = Remedy.RETRY, 105.0
    assert bench.launches() == []
    bench.memory.now = 100.0
    bench.handled(m.Appended("commit", A, 6, seq=3))
    assert bench.launches() == []


def test_who_is_rescued_is_awaited(bench: Bench) -> None:
    bench.collects()
    bench.handled(m.Inventory("n1", 1, ()))
    bench.worker("dying")
    bench.node.start_worker("w1")
    for _ in range(3):
        bench.handled(m.Tick(), m.KillWorker("w1", "why"))
    saved = m.Heartbeat("n1", A, {"w1": 5}, (), ("w1",))
    assert bench.handled(saved) == []
    assert bench.launches() == ["1.2 is launched while slots of w1 are saved"]
    worker = bench.memory.roster.workers.pop("w1")
    assert bench.handled(m.Tick()) == ["w1 counts as dead while its slots are saved"]
    bench.memory.roster.workers["w1"] = worker
    assert bench.handled(m.Heartbeat("n1", A, {"w1": 5})) == []
    assert bench.launches() == []


def test_a_worker_counts_as_dead_when_that_is_heard_or_after_several_orders(bench: Bench) -> None:
    for orders, found in ((2, ["w1 counts as dead after 2 orders to die"]), (3, [])):
        bench.worker("dying")
        bench.handled(m.Tick(), *[m.KillWorker("w1", "why")] * orders)
        assert bench.handled(m.Tick()) == []
        del bench.memory.roster.workers["w1"]
        assert bench.handled(m.Tick()) == found
        assert bench.handled(m.Tick()) == []
    bench.worker("dying")
    bench.handled(m.Tick(), m.KillWorker("w1", "why"))
    bench.memory.roster.lose("n1", silent=True)
    assert bench.handled(m.Tick()) == [], "its node is gone with it"


def test_a_start_is_not_awaited_for_ever(bench: Bench) -> None:
    bench.worker("starting")
    assert bench.handled(m.Tick(), m.StartWorker("w1", "n1")) == []
    bench.memory.now += bench.memory.job.cluster.start_timeout_s + 4.0
    assert bench.handled(m.Tick()) == []
    bench.memory.now += 0.1
    bench.memory.roster.workers["w1"].since = bench.memory.now
    assert bench.handled(m.Tick()) == ["w1 is awaited for ever"], "whatever the machine thinks"
    bench.worker("idle")
    assert bench.handled(m.WorkerReady("w1", "n1")) == []
    bench.worker("starting")
    assert bench.handled(m.Tick()) == []


def test_all_are_told_that_their_generation_is_given_up(bench: Bench) -> None:
    for name in ("w1", "w2"):
        bench.memory.roster.workers[name] = RosterWorker(name, "n1", "busy", 100.0)
    bench.memory.state = MachineState.ABORTING
    bench.memory.transitions = [(MachineState.RUNNING, MachineState.ABORTING)]
    told = [m.Interrupt("w1", A, "hard"), m.Interrupt("w2", A, "boundary")]
    assert bench.handled(m.Tick(), *told) == ["w2 is not told that its generation is given up"]
    bench.memory.roster.workers["w2"].state = "dying"
    assert bench.handled(m.Tick(), *told) == []
    bench.memory.state = MachineState.COLLECTING
    bench.memory.transitions.append((MachineState.ABORTING, MachineState.COLLECTING))
    assert bench.handled(m.Tick(), m.CollectInventory("n1", 1)) == [], "nobody was left"


def test_who_lives_and_is_not_known_is_told_to_die(bench: Bench) -> None:
    found = ["w1 lives, is not known, and is not told to die"]
    for event in (
        m.WorkerReady("w1", "n1"),
        m.Heartbeat("n1", A, {"w1": 3}),
        m.Heartbeat("n1", A, {}, ("w1",)),
    ):
        assert bench.handled(event) == found
        assert bench.handled(event, m.KillWorker("w1", "why")) == []
    assert bench.handled(m.Heartbeat("n2", A, {"w1": 3})) == [], "its node is lost"
    bench.worker("idle")
    assert bench.handled(m.WorkerReady("w1", "n1")) == []


def test_only_states_that_count_are_uploaded_and_by_nodes_that_are_there(bench: Bench) -> None:
    upload = m.Upload("n1", A, 5, ("s",))
    assert bench.handled(m.Tick(), upload) == []
    bench.memory.spec, bench.memory.state = NEXT, MachineState.COLLECTING
    bench.sim.checks.histories.handled(bench.shell, m.Heartbeat("n1", A, {"w1": 6}))  # type: ignore[attr-defined]
    assert bench.handled(m.Tick(), replace(upload, step=6)) == [], "nobody has seen the next one at work"
    bench.memory.state = MachineState.RUNNING
    assert bench.handled(m.Tick(), upload) == []
    assert bench.handled(m.Tick(), replace(upload, step=6)) == ["step 6 of 1.1 is uploaded, and is void"]
    bench.memory.roster.lose("n1", silent=True)
    assert bench.handled(m.Tick(), upload) == ["n1 is asked for an upload, and counts as lost"]
    bench.memory.roster.join("n1", 3, 100.0)
    assert bench.handled(m.Tick(), upload) == [], "it is back"
    assert bench.handled(m.Tick(), m.Upload("n2", A, 5, ("s",))) == [], "it has yet to join"
    assert bench.handled(m.NodeLost("n2", "gone"), m.Upload("n2", A, 5, ("s",))) != []


def test_what_is_told_to_be_committed_is(bench: Bench) -> None:
    release = m.Release("n1", A, 5, 0)
    assert bench.handled(m.Tick(), release) == []
    bench.shell.commits = [m.Commit(5, A, "m5", 3), m.Commit(7, A, "m7", 4)]
    bench.memory.spec, bench.memory.state = NEXT, MachineState.RUNNING
    assert bench.handled(m.Tick(), replace(release, committed=5)) == []
    told = bench.handled(m.Tick(), replace(release, committed=7))
    assert told == ["step 7 is told to be committed, and no commit of it counts"]


def test_growth_awaits_workers_that_start(bench: Bench) -> None:
    grows = m.Alert("info", "stopping generation 1.1 at a boundary: grow from 1 to 2 workers", "boundary")
    bench.worker("idle")
    assert bench.handled(m.Tick(), grows) == []
    bench.memory.roster.workers["w2"] = RosterWorker("w2", "n1", "starting", 100.0)
    assert bench.handled(m.Tick(), grows) == ["1.1 grows, and more workers are on their way"]
    bench.memory.now = 110.0
    assert bench.handled(m.Tick(), grows) == []


def test_what_an_upload_or_a_newer_commit_makes_needless_is_freed(bench: Bench) -> None:
    """Storage has no part in it: it is down here."""
    promptness = bench.sim.checks.promptness  # type: ignore[attr-defined]
    bench.sim.now, bench.sim.storage.down_until = 100.0 + 2 * SETTLED_S, 1e9
    bench.memory.state = MachineState.RUNNING
    info = m.SlotInfo("n1", "w1.0", A, 5, 0, ())
    held = SimSlot(info, (), pinned=True)
    bench.node.slots["w1.0"] = held
    expected: list[Any] = []
    bench.sim.after = lambda delay_s, call, *words: expected.append((call, words))  # type: ignore[method-assign]
    bench.shell.told_seals = {("n1", A, 5), ("n1", A, 7)}
    for upload in (m.Upload("n1", A, 5, ()), m.Upload("n1", A, 6, ())):
        promptness.uploading(bench.shell, upload)
        assert expected == [], "it is no newer snapshot"
    promptness.uploading(bench.shell, m.Upload("n1", A, 7, ()))
    sealed = m.SnapshotSealed("n1", A, 5, (info,))
    promptness.sealed(bench.shell, sealed)
    assert len(expected) == 1
    bench.shell.commits = [m.Commit(7, A, "m7", 4)]
    promptness.sealed(bench.shell, sealed)
    for (call, words), why in zip(
        expected, ("step 7 is uploaded in its place", "a newer one was committed before"), strict=True
    ):
        call(*words)
        found, bench.sim.failures = bench.sim.failures, []
        assert found == [f"at 120.000 s: step 5 in w1.0 on n1 is still pinned: {why}"]
        held.pinned = False
        call(*words)
        held.pinned = True
    assert bench.sim.failures == []


def test_room_for_a_snapshot_is_missed_when_all_is_long_calm(bench: Bench) -> None:
    promptness = bench.sim.checks.promptness  # type: ignore[attr-defined]
    generation = bench.sim.generation(SPEC)
    for step, now, found in ((2, 500.0, 0), (3, 159.0, 0), (3, 500.0, 1)):
        generation.step, bench.sim.now = step, now
        promptness.skipped(bench.node, generation)
        assert len(bench.sim.failures) == found


def test_no_worker_is_started_where_a_node_is_about_to_go() -> None:
    bench, start = Bench(), m.StartWorker("w2", "n1")
    assert bench.handled(m.Tick(), start) == []
    assert bench.handled(m.DrainNotice("n1", 120.0)) == []
    assert bench.handled(m.Tick(), start) == ["w2 is started on n1, which is about to go"]
    assert bench.handled(m.NodeLost("n1", "gone")) == []
    assert bench.handled(m.Tick(), start) == []


def test_nobody_is_killed_over_a_generation_that_it_was_never_called_for(bench: Bench) -> None:
    bench.sim.now = 200.0
    bench.memory.state = MachineState.ABORTING
    bench.worker("busy")
    bench.node.start_worker("w1")
    worker = bench.node.workers["w1"]
    kill = m.KillWorker("w1", "did not leave")
    found = ["w1 is killed over 1.1, which it was never called for"]
    assert bench.handled(m.Tick(), kill) == found
    for excuse in ("frozen_until", "cut_until", "deaf_until", "dumb_until", "loses_until"):
        setattr(bench.node, excuse, 200.0 - SETTLED_S)
        assert bench.handled(m.Tick(), kill) == [], "its call may have been lost"
        setattr(bench.node, excuse, 199.9 - SETTLED_S)
        assert bench.handled(m.Tick(), kill) == found
    bench.node.store_bad_until = 300.0
    assert bench.handled(m.Tick(), kill) == found, "a bad store is no excuse"
    worker.last = A
    assert bench.handled(m.Tick(), kill) == []


def test_a_silent_node_is_not_asked_for_a_store_where_another_is_heard(bench: Bench) -> None:
    spec = replace(SPEC, members=(m.Member("w1", "n1"), m.Member("w2", "n2")))
    bench.memory.roster.join("n2", 3, 100.0)
    orders: Any = bench.sim.checks.orders  # type: ignore[attr-defined]
    orders.store_asked(bench.shell, "n1", spec)
    assert bench.sim.failures == []
    bench.memory.roster.nodes["n1"].last_seen = 97.0
    orders.store_asked(bench.shell, "n2", spec)
    assert bench.sim.failures == []
    orders.store_asked(bench.shell, "n1", spec)
    assert bench.sim.failures.pop().endswith("n1 is silent, and is asked for the store of 1.1: not {'n2'}")
    bench.memory.roster.nodes["n2"].last_seen = 97.0
    orders.store_asked(bench.shell, "n1", spec)
    assert bench.sim.failures == [], "all are"
