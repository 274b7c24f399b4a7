"""Faults, network and nodes of the simulation, one by one, in a world that is otherwise quiet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator import breakdowns, faults, run
from picotron_ray.coordinator.simulator.nodes import SimWorker
from picotron_ray.coordinator.simulator.promptness import LATE_S
from picotron_ray.coordinator.simulator.rng import Rng
from picotron_ray.coordinator.simulator.run import FAMILIES
from picotron_ray.coordinator.simulator.slots import SimSlot
from picotron_ray.coordinator.simulator.world import RESTART_S, RETRY_S, SETTLED_S
from picotron_ray.errors import LayoutError
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import job
from tests.support.runs.quiet_simulation import SPEC, TWO, A, Quiet


@pytest.fixture
def quiet() -> Quiet:
    return Quiet()


def test_a_ready_worker_is_killed(quiet: Quiet) -> None:
    quiet.worker(1).ready = False
    faults.kill(quiet.sim)
    assert [list(node.workers) for node in quiet.sim.nodes.values()] == [["w1"], []]
    assert quiet.planned == [(0.04, "report", m.WorkerExited("w2", "killed"), True)]
    faults.kill(quiet.sim)
    assert len(quiet.planned) == 1, "none is ready"


def test_a_worker_at_work_hangs_or_fails(quiet: Quiet) -> None:
    faults.hang(quiet.sim)
    faults.error(quiet.sim)
    assert quiet.planned == []
    quiet.run()
    faults.hang(quiet.sim)
    assert (quiet.worker(1).hung, quiet.worker(2).hung) == (True, False)
    assert quiet.planned == [(1.5, "stalled")]
    faults.error(quiet.sim)
    outcome = quiet.worker(2).outcome
    assert outcome is not None
    assert (outcome.kind, outcome.detail) == (FailureKind.FAILED, "nan")
    assert (quiet.worker(1).outcome, quiet.worker(2).generation) == (None, None)


def test_pages_are_lost_for_good_or_for_a_moment(quiet: Quiet) -> None:
    faults.page_lost(quiet.sim)
    assert quiet.planned == [], "nobody is at work"
    generation = quiet.run()
    quiet.dice.chance = lambda share: share == 0.5
    faults.page_lost(quiet.sim)
    one, two = quiet.worker(1), quiet.worker(2)
    assert (one.paged, one.shown, one.hung, two.paged, two.shown) == (False, False, True, True, True)
    elastic = quiet.sim.job.elastic
    noticed_s = elastic.node_timeout_s + 2 * elastic.heartbeat_s + LATE_S
    assert quiet.planned == [
        (noticed_s, "_unseen_still", one, generation, quiet.sim.now),
        (faults.UNKNOWN_S, "worker_dies", one, "killed"),
        (1.5, "stalled"),
    ]
    quiet.planned.clear()
    one.paged, one.hung = True, False
    quiet.dice.chance = lambda share: share == 0.3
    faults.page_lost(quiet.sim)
    assert (one.paged, one.hung) == (False, False)
    assert quiet.planned == [(1.6, "_read_again", quiet.sim, [one])]
    faults._read_again(quiet.sim, [one])
    assert (one.paged, one.read_again_at) == (True, 100.0)


def test_who_has_no_page_is_shown_nowhere(quiet: Quiet) -> None:
    generation, node = quiet.run(), quiet.sim.nodes["n1"]
    quiet.worker(1).paged = False
    quiet.sim._beat(node)
    node.hello()
    told = [words[2] for words in quiet.planned if words[1] == "<lambda>"]
    assert [*quiet.heard, *told] == [m.Heartbeat("n1", None), node.joined()]
    quiet.planned.clear()
    generation.torn = True
    generation.stalled()
    assert generation.complained, "w2 is seen"
    assert quiet.planned[0][2] == m.Stalled("w2", A, "reduce", 1.5)
    quiet.planned.clear()
    generation.complained, quiet.worker(2).paged = False, False
    generation._complain()
    assert (generation.complained, quiet.planned) == (False, [(1.0, "_complain")])
    generation._seal("n1", 5)
    assert len(quiet.planned) == 1, "none of its snapshots is told of"


def test_a_folder_is_deleted_and_what_workers_hold_open_is_saved(quiet: Quiet) -> None:
    breakdowns.emptied(quiet.sim)
    assert quiet.planned == [], "nobody is at work"
    generation, node = quiet.run(), quiet.sim.nodes["n1"]
    breakdowns.emptied(quiet.sim)
    one = quiet.worker(1)
    assert (one.rescued, one.hung, quiet.worker(2).rescued) == (True, True, False)
    assert quiet.planned == [(1.5, "stalled"), (8.0, "_saved", [one])]
    assert node.rescued_until in node.disturbed_until()
    quiet.planned.clear()
    node.kill("w1")
    node.collect(3)
    assert quiet.planned == [], "neither its death nor an inventory, for now"
    quiet.sim._beat(node)
    assert quiet.heard == [m.Heartbeat("n1", A, {"w1": generation.step}, (), ("w1",))]
    quiet.planned.clear()
    generation.torn = True
    generation._complain()
    assert quiet.planned[0][2] == m.Stalled("w2", A, "reduce", 1.5), "w1 stands still for a reason"
    quiet.planned.clear()
    breakdowns.emptied(quiet.sim)
    assert quiet.planned[-1] == (8.0, "_saved", [quiet.worker(2)]), "not the same node again"
    quiet.planned.clear()
    node._saved([one])
    assert one.rescued is False
    assert quiet.planned == [(0.04, "report", m.WorkerExited("w1", "its files were deleted"), True)]


def test_a_node_dies_and_another_one_joins(quiet: Quiet) -> None:
    faults.node(quiet.sim)
    assert list(quiet.sim.nodes) == ["n2"]
    assert quiet.planned[-2:] == [(1.1, "tell", m.NodeLost("n1", "removed")), (8.5, "add_node", 3)]
    assert quiet.sim.ghosts == set()
    quiet.planned.clear()
    quiet.dice.luck = False
    faults.node(quiet.sim)
    assert quiet.planned[-1:] == [(8.5, "add_node", 3)]
    assert "tell" not in [words[1] for words in quiet.planned], "only its silence tells"
    assert quiet.sim.ghosts == {"n2"}
    quiet.planned.clear()
    for fault in (faults.node, faults.cut, faults.drain):
        fault(quiet.sim)
    assert quiet.planned == [], "there is none"


def test_a_drained_node_goes_when_it_was_announced(quiet: Quiet) -> None:
    gone = quiet.sim.nodes["n1"]
    faults.drain(quiet.sim)
    arrival, going = quiet.planned
    assert arrival[1:] == (quiet.shell.deliver.__name__, m.DrainNotice("n1", 106.0))
    assert going == (6.0, "_drained", quiet.sim, gone, 100.0)
    quiet.planned.clear()
    faults._drained(quiet.sim, gone, 100.0)
    assert list(quiet.sim.nodes) == ["n2"]
    assert quiet.planned[-2:] == [(1.1, "tell", m.NodeLost("n1", "removed")), (5.5, "add_node", 3)]
    quiet.planned.clear()
    faults._drained(quiet.sim, gone, 100.0)
    assert quiet.planned == [(5.5, "add_node", 3)], "it went before"


def test_a_cut_lasts_for_a_while(quiet: Quiet) -> None:
    faults.cut(quiet.sim)
    node, other = quiet.sim.nodes.values()
    assert (node.cut_until, node.cut, other.cut) == (106.5, True, False)
    quiet.sim.now = 106.5
    assert not node.cut
    quiet.sim.now = 106.5 + SETTLED_S
    assert not quiet.sim.reachable(node), "not yet asked again"
    assert quiet.sim.reachable(other)
    quiet.sim.now += 0.1
    assert quiet.sim.reachable(node)


def test_a_coordinator_dies_and_comes_back_unless_the_run_is_over(quiet: Quiet) -> None:
    faults.coordinator(quiet.sim)
    assert quiet.sim.shell is quiet.shell, "it lives"
    faults.restart(quiet.sim)
    assert (quiet.heard, quiet.sim.shell) == (["died"], None)
    assert quiet.planned == [(RESTART_S, "coordinator", quiet.sim)]
    for fault in (faults.restart, faults.pause, faults.rival):
        fault(quiet.sim)
    assert len(quiet.planned) == 1, "there is none"
    quiet.sim.over = True
    faults.coordinator(quiet.sim)
    assert quiet.sim.shell is None
    quiet.sim.over = False
    faults.coordinator(quiet.sim)
    assert quiet.sim.shell is not None
    assert quiet.sim.storage.term == 1


def test_a_coordinator_is_stopped_and_maybe_replaced(quiet: Quiet) -> None:
    faults.pause(quiet.sim)
    assert (quiet.heard, quiet.planned) == ([8.0], [])
    quiet.heard.clear()
    quiet.shell.machine.memory.term = 0
    faults.rival(quiet.sim)
    assert (quiet.heard, quiet.sim.shell) == ([], quiet.shell), "it has not begun"
    quiet.shell.machine.memory.term = 1
    faults.rival(quiet.sim)
    assert (quiet.heard, quiet.sim.shell) == ([5.25], None)
    assert quiet.planned == [
        (1.0, "coordinator", quiet.sim), (5.75, "_provoke", quiet.sim, quiet.shell)
    ]  # fmt: skip
    quiet.heard.clear()
    faults._provoke(quiet.sim, quiet.shell)
    assert quiet.heard == [m.WorkerExited("w1", "killed")]
    quiet.shell.newest = None
    faults._provoke(quiet.sim, quiet.shell)
    assert len(quiet.heard) == 1


def test_storage_and_network_are_disturbed_from_now_on(quiet: Quiet) -> None:
    for fault in (faults.outage, faults.lag, faults.mute, faults.noise):
        fault(quiet.sim)
    storage = quiet.sim.storage
    assert (storage.down_until, storage.slow_until, storage.mute_until) == (106.5, 109.0, 106.5)
    assert quiet.sim.noise_until == 107.5


def hold(quiet: Quiet, step: int, *parts: int) -> None:
    for part in parts:
        info = m.SlotInfo("n1", f"{step}.{part}", A, step, part, (m.Fragment(0, part, 2),))
        quiet.sim.nodes["n1"].keep(SimSlot(info, ((A, 0, step),)))


def test_bits_flip_in_the_newest_slots_alone(quiet: Quiet) -> None:
    faults.corrupt(quiet.sim)
    assert quiet.planned[-1] == (0.15, "_flip", quiet.sim)
    assert "w1" not in quiet.sim.nodes["n1"].workers
    faults._flip(quiet.sim)
    hold(quiet, 5, 0, 1)
    hold(quiet, 7, 0, 1, 2, 3)
    left = iter((1, 3))
    quiet.dice.pick = lambda items: items[next(left)]
    faults._flip(quiet.sim)
    assert [s.info.slot for s in quiet.sim.nodes["n1"].slots.values() if s.corrupt] == ["7.1", "7.3"]
    quiet.sim.nodes["n1"].slots.clear()
    hold(quiet, 5, 0)
    left = iter((0,))
    faults._flip(quiet.sim)
    assert [s.corrupt for s in quiet.sim.nodes["n1"].slots.values()] == [True]


def test_the_newest_commit_rots_where_there_is_an_older_one(quiet: Quiet) -> None:
    storage = quiet.sim.storage
    storage.claim()
    storage.append_generation(1, SPEC)
    for step, bad in ((5, set()), (7, {"manifests/7-1.1"})):
        hold(quiet, step, 0, 1)
        storage.parts[A, step] = {
            "n1": [s for s in quiet.sim.nodes["n1"].slots.values() if s.info.step == step]
        }
        assert storage.append_commit(1, m.AppendCommit(A, step, ("n1",))).seq > 0
        faults.rot(quiet.sim)
        assert quiet.sim.bad_manifests == bad
    quiet.dice.luck = False
    quiet.sim.bad_manifests.clear()
    faults.rot(quiet.sim)
    assert quiet.sim.bad_manifests == set()


def test_the_user_asks_until_a_coordinator_obeys(quiet: Quiet) -> None:
    faults.request(quiet.sim)
    assert (quiet.heard, quiet.sim.stop_asked) == ([m.UserRequest("checkpoint")], False)
    faults.stop(quiet.sim)
    assert (quiet.heard[1:], quiet.sim.stop_asked) == ([m.UserRequest("stop")], True)
    assert quiet.planned == [(5.0, "stop", quiet.sim)]
    quiet.sim.over, quiet.sim.shell = True, None
    faults.stop(quiet.sim)
    assert (len(quiet.heard), len(quiet.planned)) == (2, 1)


# --- network ---------------------------------------------------------------------------------------


def test_without_noise_messages_arrive_once_and_soon(quiet: Quiet) -> None:
    sim, node = quiet.sim, quiet.sim.nodes["n1"]
    sim.noise_until = sim.now
    assert (sim.lost(), sim.doubled(), sim.latency()) == (False, False, 0.001)
    sim.to_coordinator(node, m.Tick(), False)
    assert sim.to_node("n1", 1, node.hello, retry=False)  # type: ignore[arg-type]
    assert [words[:2] for words in quiet.planned] == [(0.001, "<lambda>"), (0.001, "_arrive")]
    sim.noise_until = sim.now + 0.1
    quiet.dice.luck = False
    assert (sim.lost(), sim.doubled(), sim.latency()) == (False, False, 0.001)
    quiet.dice.luck = True
    assert (sim.lost(), sim.doubled(), sim.latency()) == (True, True, 1.35)


def test_in_noise_reliable_messages_are_sent_again_and_others_lost(quiet: Quiet) -> None:
    sim, node = quiet.sim, quiet.sim.nodes["n1"]
    sim.noise_until = sim.now + 1.0
    event = m.Inventory("n1", 1, ())
    sim.to_coordinator(node, event, False)
    assert sim.to_node("n1", 1, node.hello, retry=False)  # type: ignore[arg-type]
    assert quiet.planned == []
    sim.to_coordinator(node, event, True)
    assert sim.to_node("n1", 1, node.hello, retry=True)  # type: ignore[arg-type]
    assert quiet.planned == [
        (RETRY_S, "to_coordinator", node, event, True),
        (RETRY_S, "to_node_again", "n1", 1, node.hello),
    ]
    quiet.planned.clear()
    sim.lost = lambda: False  # type: ignore[method-assign]
    sim.to_coordinator(node, event, False)
    sim.to_node("n1", 1, node.hello, retry=False)  # type: ignore[arg-type]
    assert [words[0] for words in quiet.planned] == [1.35, 1.35 + 0.05] * 2


def test_where_no_coordinator_lives_only_what_it_must_hear_is_kept(quiet: Quiet) -> None:
    sim, node = quiet.sim, quiet.sim.nodes["n1"]
    sim.shell = None
    kept = m.WorkerReady("w1", "n1")
    for event in (m.Outcome("w1", A, "finished", 5), m.WorkerExited("w1", "x"), kept):
        sim.to_coordinator(node, event, True)
    sim.to_coordinator(node, kept, False)
    assert quiet.planned == [(RETRY_S, "to_coordinator", node, kept, True)]
    sim.tell(m.Tick())
    assert quiet.heard == []


def test_of_a_node_that_is_gone_only_exits_are_heard_and_of_a_ghost_nothing(quiet: Quiet) -> None:
    sim, node = quiet.sim, quiet.sim.nodes.pop("n1")
    exited = m.WorkerExited("w1", "killed")
    sim.to_coordinator(node, m.Inventory("n1", 1, ()), True)
    sim.to_coordinator(node, exited, True)
    assert [words[2:] for words in quiet.planned] == [(exited,)]
    assert not sim.to_node("n1", 1, node.hello, retry=True)  # type: ignore[arg-type]
    sim.ghosts.add("n1")
    sim.to_coordinator(node, exited, True)
    assert sim.to_node("n1", 1, node.hello, retry=True)  # type: ignore[arg-type]
    assert len(quiet.planned) == 1


def test_calls_of_old_terms_and_to_dead_nodes_are_refused(quiet: Quiet) -> None:
    sim, node = quiet.sim, quiet.sim.nodes["n1"]
    came: list[int] = []
    refused: list[m.Event] = []
    sim.by_term[1] = SimpleNamespace(deliver=refused.append)  # type: ignore[assignment]
    for term in (2, 2, 1, 3):
        sim._arrive(node, term, lambda node, term=term: came.append(term))  # type: ignore[misc]
    assert (came, node.term) == ([2, 2, 3], 3)
    assert [words[1] for words in quiet.planned] == ["append"], "it is told"
    del sim.nodes["n1"]
    sim._arrive(node, 4, lambda node: came.append(4))
    assert came == [2, 2, 3]


def test_a_node_beats_until_it_is_gone(quiet: Quiet) -> None:
    sim, node = quiet.sim, quiet.sim.nodes["n1"]
    beat_s = job().elastic.heartbeat_s
    sim._beat(node)
    assert (quiet.heard, quiet.planned) == ([m.Heartbeat("n1", None, {}, ("w1",))], [(beat_s, "_beat", node)])
    quiet.run().step = 7
    sim._beat(node)
    assert quiet.heard[1:] == [m.Heartbeat("n1", A, {"w1": 7})]
    node.cut_until = 101.0
    sim._beat(node)
    assert len(quiet.heard) == 2
    quiet.planned.clear()
    del sim.nodes["n1"]
    sim._beat(node)
    assert (len(quiet.heard), quiet.planned) == (2, [])


def test_a_source_is_unreadable_by_what_is_gone_or_corrupt(quiet: Quiet) -> None:
    sim = quiet.sim
    hold(quiet, 5, 0, 1)
    slots = tuple(held.info for held in sim.nodes["n1"].slots.values())
    source = m.Source("slots", 5, A, slots)
    assert sim.unreadable(source) == ""
    sim.nodes["n1"].slots["5.1"].corrupt = True
    assert sim.unreadable(source) == "corrupt:5.1"
    del sim.nodes["n1"].slots["5.0"]
    assert sim.unreadable(source) == "error: a source slot is gone"
    sim.bad_manifests = {"m5"}
    assert sim.unreadable(m.Source("commit", 5, A, manifest="m5")) == "corrupt:m5"
    assert sim.unreadable(m.Source("commit", 5, A, manifest="m6")) == ""


def test_a_node_that_joins_has_a_name_of_its_own(quiet: Quiet) -> None:
    sim = quiet.sim
    sim.names = 2
    node = sim.add_node(4)
    assert (node.name, node.capacity, list(sim.nodes)) == ("n3", 4, ["n1", "n2", "n3"])
    assert quiet.planned[0][2:] == (m.NodeJoined("n3", 4),)
    assert quiet.planned[1] == (0.5, "_beat", node)


# --- nodes and workers -----------------------------------------------------------------------------


@pytest.fixture
def reports(quiet: Quiet) -> list[Any]:
    """What the agents report: (event, reliable)."""
    told: list[Any] = []
    quiet.sim.to_coordinator = lambda node, event, reliable: told.append((event, reliable))  # type: ignore[method-assign]
    return told


def test_a_worker_runs_what_is_newer_and_repeats_an_outcome_for_a_coordinator_that_adopts(
    quiet: Quiet, reports: list[Any]
) -> None:
    worker = SimWorker("w1", quiet.sim.nodes["n1"])
    assert (worker.clean, worker.writing, worker.ready, worker.hung, worker.last) == (
        0,
        False,
        False,
        False,
        None,
    )
    quiet.sim.nodes["n1"].workers["w1"] = worker
    spec = m.GenerationSpec(A, TWO, Layout(dp=2), m.Source("init", 4), "start")
    worker.writing = True
    worker.run(spec, False)
    assert (worker.last, worker.outcome, worker.clean, worker.writing) == (A, None, 4, False)
    worker.run(spec, True)
    assert reports == [], "it has no outcome yet"
    generation = worker.generation
    assert generation is not None
    worker.leave(generation, "interrupted", "x")
    assert worker.outcome == m.Outcome("w1", A, "interrupted", 4, "x")
    assert [words[:2] for words in quiet.planned[-2:]] == [(0.045, "report"), (0.775, "report")]
    assert [words[2:] for words in quiet.planned[-2:]] == [(worker.outcome, True), (worker.outcome,)]
    worker.run(spec, False)
    assert reports == []
    worker.run(spec, True)
    assert reports == [(worker.outcome, True)]
    later = m.GenerationSpec(m.GenerationId(1, 2), TWO, Layout(dp=2), m.Source("init"), "later")
    worker.run(later, True)
    none = m.Outcome("w1", later.id, FailureKind.PEER_LOST, -1, "no rendezvous store")
    assert (reports.pop(), worker.last) == ((none, True), A), "it joins what it knows"
    older = m.GenerationSpec(m.GenerationId(1, 0), TWO, Layout(dp=2), m.Source("init"), "old")
    worker.run(older, True)
    assert (len(reports), worker.last, quiet.sim.failures) == (1, A, [])


def test_an_interrupt_counts_for_its_generation_while_it_is_whole(quiet: Quiet, reports: list[Any]) -> None:
    worker = quiet.worker(1)
    worker.interrupt(A, "hard")
    generation = quiet.run()
    worker.interrupt(m.GenerationId(1, 2), "hard")
    worker.hung = True
    worker.interrupt(A, "hard")
    worker.hung = False
    worker.interrupt(A, "snapshot")
    assert (generation.boundary, worker.generation) == (False, generation)
    generation.broken = True
    worker.interrupt(A, "boundary")
    assert not generation.boundary
    generation.broken = False
    worker.interrupt(A, "boundary")
    assert (generation.boundary, worker.generation) == (True, generation)
    worker.interrupt(A, "hard")
    assert worker.generation is None
    assert worker.outcome is not None
    assert (worker.outcome.kind, worker.outcome.step) == (FailureKind.PEER_LOST, 0)
    assert generation.broken


def test_a_member_leaves_once_at_the_step_that_it_holds(quiet: Quiet, reports: list[Any]) -> None:
    generation = quiet.run()
    generation.step = 9
    generation.ended = True
    stranger = SimWorker("w1", quiet.sim.nodes["n1"])
    stranger.generation = generation
    stranger.leave(generation, "finished")
    assert stranger.outcome is None, "another process has its name"
    quiet.worker(1).leave(generation, "finished")
    assert quiet.worker(1).outcome == m.Outcome("w1", A, "finished", 9)
    quiet.worker(1).outcome = None
    quiet.worker(1).leave(generation, "finished")
    assert quiet.worker(1).outcome is None, "it has left"
    quiet.worker(2).hung = True
    quiet.worker(2).leave(generation, "finished")
    assert (quiet.worker(2).outcome, generation.broken) == (None, False)


def test_a_node_introduces_itself_with_its_ready_workers(quiet: Quiet, reports: list[Any]) -> None:
    node = quiet.sim.nodes["n1"]
    assert (node.term, node.spec, node.cut_until) == (0, None, 0.0)
    node.workers["starting"] = SimWorker("starting", node)
    node.hello()
    assert reports == [(m.NodeJoined("n1", 3, idle=("w1",)), True)]


def test_workers_start_once_where_there_is_room(quiet: Quiet, reports: list[Any]) -> None:
    node = quiet.sim.nodes["n1"]
    quiet.sim.start_failures, quiet.dice.luck = 0.3, False
    for name in ("a", "b", "c", "c", "d"):
        node.start_worker(name)
    assert list(node.workers) == ["w1", "a", "b", "c"], "one more than fits, for one that is about to go"
    assert [words[:2] for words in quiet.planned] == [(1.9, "_up")] * 3 + [(1.0, "start_worker")]
    assert quiet.planned[-1][2:] == ("d",)
    worker = node.workers["a"]
    node._up(worker)
    assert (worker.ready, reports) == (True, [(m.WorkerReady("a", "n1"), True)])
    node._up(SimWorker("a", node))
    assert len(reports) == 1
    del node.workers["a"]
    quiet.dice.luck = True
    node.start_worker("e")
    assert quiet.planned[-1] == (1.0, "worker_dies", node.workers["e"], "start_failed")
    node.worker_dies(node.workers["e"], "start_failed")
    del quiet.sim.nodes["n1"]
    node.start_worker("f")
    assert "f" not in node.workers


def test_a_worker_dies_once_and_breaks_its_generation(quiet: Quiet, reports: list[Any]) -> None:
    node, worker, generation = quiet.sim.nodes["n1"], quiet.worker(1), quiet.run()
    node.worker_dies(SimWorker("w1", node), "killed")
    assert not generation.broken
    node.kill("w1")
    assert (generation.broken, worker.generation, node.workers) == (True, None, {})
    assert quiet.planned[-1] == (0.04, "report", m.WorkerExited("w1", "killed"), True)
    node.kill("w1")
    assert reports == [(m.WorkerExited("w1", "unknown"), True)]


def test_slots_stay_pinned_until_their_release(quiet: Quiet, reports: list[Any]) -> None:
    node = quiet.sim.nodes["n1"]
    node.worker_dies(quiet.worker(1), "killed")
    node.workers["live"] = SimWorker("live", node)

    def keep(owner: str, n: int, step: int, pinned: bool) -> SimSlot:
        info = m.SlotInfo("n1", f"{owner}.{n}.{step}", m.GenerationId(1, n), step, 0, ())
        held = SimSlot(info, (), pinned)
        node.keep(held)
        assert quiet.sim.checks.slots[info.identity] is held
        return held

    for first, second, pinned in ((True, False, True), (False, True, True), (False, False, False)):
        node.slots.clear()
        keep("x", 1, 5, first)
        assert keep("x", 1, 5, second).pinned == pinned
        assert len(node.slots) == 1
    for owner in ("dead", "live"):
        for n, step in ((1, 9), (2, 4), (2, 5), (2, 6), (3, 1)):
            keep(owner, n, step, True)
    node.release(m.GenerationId(1, 2), 5)
    assert {name: held.pinned for name, held in node.slots.items() if name != "x.1.5"} == {
        "dead.2.5": False, "dead.2.6": True, "dead.3.1": True,
        "live.1.9": False, "live.2.4": False, "live.2.5": False, "live.2.6": True, "live.3.1": True,
    }  # fmt: skip
    node.quarantine(m.Quarantine("n1", "dead.2.5", m.GenerationId(1, 2), 5))
    node.quarantine(m.Quarantine("n1", "dead.2.6", m.GenerationId(1, 2), 3))  # overwritten since
    node.quarantine(m.Quarantine("n1", "nothing", m.GenerationId(1, 2), 5))
    quiet.dice.luck = True
    node.collect(7)
    ((delay_s, _, slow),) = quiet.planned[-1:]
    assert (reports, delay_s > 0, slow.request) == ([], True, 7), "a busy node"
    quiet.dice.luck = False
    node.collect(7)
    ((inventory, reliable),) = reports
    assert ([slot.slot for slot in inventory.slots], inventory.request, reliable) == (
        list(node.slots), 7, False
    )  # fmt: skip
    assert "dead.2.5" not in node.slots
    assert "dead.2.6" in node.slots


def test_uploads_say_why_they_fail(quiet: Quiet, reports: list[Any]) -> None:
    sim, node = quiet.sim, quiet.sim.nodes["n1"]
    hold(quiet, 5, 0, 1)
    command = m.Upload("n1", A, 5, ("5.0", "5.1"))
    node.upload(command)
    assert quiet.planned == [(0.8, "_uploaded", command)]

    def uploaded(what: m.Upload = command) -> str:
        node._uploaded(what)
        event, reliable = reports.pop()
        assert (event.node, event.generation, event.step, reliable) == ("n1", A, 5, False)
        return str(event.error)

    sim.storage.down_until = 100.1
    assert (uploaded(), sim.storage.parts) == ("storage is down", {})
    sim.storage.down_until = 100.0
    assert uploaded(m.Upload("n1", A, 5, ("5.0", "5.9"))) == "gone:5.9"
    assert uploaded(m.Upload("n1", A, 5, ("5.1", "5.9"))) == "gone:5.9"
    node.slots["5.1"].corrupt = True
    assert (uploaded(), sim.storage.parts) == ("corrupt:5.1", {})
    node.slots["5.1"].corrupt = False
    assert uploaded() == ""
    assert sim.storage.parts == {(A, 5): {"n1": list(node.slots.values())}}
    del sim.nodes["n1"]
    node._uploaded(command)
    assert reports == []


# --- draws -----------------------------------------------------------------------------------------


def test_a_chance_of_half_is_missed_by_half() -> None:
    class Half(Rng):
        def random(self) -> float:
            return 0.5

    assert [Half(1).chance(probability) for probability in (0.4, 0.5, 0.6)] == [False, False, True]
    assert {Rng(seed).below(3) for seed in range(50)} == {0, 1, 2}
    assert all(2.0 <= Rng(seed).uniform(2.0, 3.0) < 3.0 for seed in range(50))


def test_the_ways_to_lay_out_workers() -> None:
    def family(kind: int, workers: int) -> Any:
        choice = FAMILIES[kind](workers)
        return choice.layout, choice.cost_s

    dp = [(Layout(dp=workers), 1 / workers) for workers in (1, 2, 5)]
    zero = [(Layout(dp=workers, zero=2), 1 / workers) for workers in (1, 2, 5)]
    assert [family(0, workers) for workers in (1, 2, 5)] == dp
    assert [family(1, workers) for workers in (1, 2, 5)] == zero
    assert [family(2, workers) for workers in (1, 3, 5)] == [
        (Layout(dp=1), 1.0), (Layout(tp=2), 0.5), (Layout(tp=2, dp=2), 0.25)
    ]  # fmt: skip
    assert [family(3, workers) for workers in (1, 3, 5)] == [
        (Layout(dp=1), 1.0), (Layout(pp=2), 0.5), (Layout(pp=2, dp=2), 0.25)
    ]  # fmt: skip
    assert [family(4, workers) for workers in (2, 3, 9)] == [(Layout(tp=2), 0.5)] * 3
    with pytest.raises(LayoutError, match="needs two workers"):
        family(4, 1)


def test_a_run_is_over_so_long_after_its_last_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(run, "plan", lambda sim, count: [(3.0, "kill"), (5.0, "kill")])
    monkeypatch.setattr(run.Sim, "run", lambda self, limit_s: seen.append((self, limit_s)))
    run.simulate(1)
    ((sim, limit_s),) = seen
    assert (sim.quiet_at, limit_s) == (5.0 + faults.LONGEST_S, run.LIMIT_S + sim.job.steps * sim.step_s)


def test_some_runs_have_hundreds_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(run.Sim, "run", lambda self, limit_s: seen.append(self))
    for seed in range(run.LARGE):
        run.simulate(seed)
    sizes = [len(sim.nodes) for sim in seen]
    assert (max(sizes[:-1]), sizes[-1], seen[-1].job.cluster.max_workers) == (3, 200, 200)


def test_agents_freeze_just_as_they_are_asked_for_a_store(quiet: Quiet) -> None:
    breakdowns.stun(quiet.sim)
    first, second = quiet.sim.nodes.values()
    assert (list(first.workers), quiet.sim.stuns) == ([], [7.0]), "one dies, so that a store is asked for"
    assert not first.away
    assert first.asked_for_store() == "mute"
    assert (first.frozen_until, first.away, quiet.sim.stuns) == (107.0, True, [])
    assert second.asked_for_store() == "", "as many as were drawn"
    second.store_fault, second.store_bad_until = "broken", 101.0
    assert second.asked_for_store() == "broken"
    breakdowns.stun(quiet.sim)
    quiet.sim.now += breakdowns.STUNS_S
    assert second.asked_for_store() == "", "nobody asked in time"


def test_a_worker_leaves_what_a_coordinator_that_is_gone_began(quiet: Quiet) -> None:
    """Its call came late, and the interrupt with it is lost."""
    worker = quiet.worker(1)
    later = m.GenerationSpec(m.GenerationId(2, 1), TWO, Layout(dp=2), m.Source("init"), "next")
    worker.run(SPEC, False)
    worker.node.term = 2
    worker.run(later, False)
    assert (worker.last, quiet.sim.failures) == (later.id, [])
    worker.run(m.GenerationSpec(m.GenerationId(2, 2), TWO, Layout(dp=2), m.Source("init"), "next"), False)
    assert quiet.sim.failures == ["at 100.000 s: w1 was told to run 2.2 while in 2.1"]
