"""Each policy of the coordinator by itself."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.append_queue import BACKOFF_S, AppendQueue
from picotron_ray.coordinator.checkpoint_tracker import CheckpointTracker, known_layouts
from picotron_ray.coordinator.lineage import descend, on_lineage
from picotron_ray.coordinator.policies.failure import Breaker
from picotron_ray.coordinator.policies.membership import (
    START_BACKOFF_S,
    Roster,
    RosterWorker,
    choose_members,
    starts,
)
from picotron_ray.coordinator.policies.restore_point import cover, newest_slots, restore_point
from picotron_ray.coordinator.policies.scale_up import GrowthView, decide
from picotron_ray.failures import FailureKind, Remedy
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import gid, of, snapshot, spec

# --- lineage --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lineage_says_the_same_as_the_rule_of_void_steps(data: st.DataObject) -> None:
    """A step of a generation is void once a later generation resumed before it."""
    specs: list[m.GenerationSpec] = []
    for n in range(1, data.draw(st.integers(1, 6)) + 1):
        valid = [(g.id, s) for g in specs for s in range(12) if on_lineage(specs[-1], g.id, s)]
        valid = [(g, s) for g, s in valid if s >= next(x.resume_step for x in specs if x.id == g)]
        kind = data.draw(st.sampled_from(["init", "state"])) if valid else "init"
        source = m.Source("init")
        if kind == "state":
            generation, step = data.draw(st.sampled_from(valid))
            source = m.Source("slots", step, generation)
        specs.append(spec(n, source, specs[-1] if specs else None))
    newest = specs[-1]
    for generation, step in itertools.product(specs, range(12)):
        if step < generation.resume_step:
            continue
        later = [x for x in specs if x.id > generation.id]
        void = any(x.resume_step < step for x in later)
        from_init = any(x.source.kind == "init" for x in later)
        expected = not void and not from_init
        if on_lineage(newest, generation.id, step) and not expected:
            raise AssertionError(f"void state {step} of {generation.id} counts")
        chain, at = {newest.id}, newest
        while at.source.generation is not None:
            at = next(x for x in specs if x.id == at.source.generation)
            chain.add(at.id)
        if expected and generation.id in chain:
            assert on_lineage(newest, generation.id, step)


def test_nothing_is_void_while_no_generation_is_known() -> None:
    assert on_lineage(None, gid(1), 5)
    assert descend(None, m.Source("commit", 5, gid(1), manifest="x")) == (m.Link(gid(1), 5),)
    assert descend(spec(1, m.Source("init"), None), m.Source("init")) == ()


# --- ladder ---------------------------------------------------------------------------------------

LAYOUTS = [Layout(dp=2), Layout(tp=2), Layout(dp=2, zero=2), Layout(pp=2, dp=2), Layout(dp=2, tp=2), Layout()]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LAYOUTS), st.data())
def test_cover_is_whole_exactly_where_every_group_has_all_parts_of_one_count(
    layout: Layout, data: st.DataObject
) -> None:
    parts = [m.Fragment(g, i, c) for g in range(layout.state_groups) for c in (1, 2, 3) for i in range(c)]
    chosen = data.draw(st.lists(st.tuples(st.sampled_from(parts), st.integers(0, 3)), max_size=14))
    slots = [
        m.SlotInfo(f"n{rank % 2}", f"s{at}", gid(1), 5, rank, (part,))
        for at, (part, rank) in enumerate(chosen)
    ]
    have = {(p.group, p.count, p.index) for p, _ in chosen}
    whole = all(
        any(all((g, c, i) in have for i in range(c)) for c in (1, 2, 3)) for g in range(layout.state_groups)
    )
    found = cover(slots, layout)
    assert (found is not None) == whole
    if found is not None:
        assert set(found) <= set(slots)
        assert cover(found, layout) is not None


def test_cover_prefers_one_node_and_low_ranks() -> None:
    layout = Layout(dp=4)
    slots = [
        m.SlotInfo(node, f"s{rank}", gid(1), 5, rank, (m.Fragment(0, rank % 2, 2),))
        for rank, node in enumerate(["a", "b", "b", "a"])
    ]
    slots.append(m.SlotInfo("b", "whole", gid(1), 5, 2, (m.Fragment(0),)))
    found = cover(slots, layout)
    assert found is not None
    assert {slot.node for slot in found} == {"b"}


def test_ladder_takes_memory_before_a_commit_of_the_same_step_and_a_newer_commit_before_memory() -> None:
    one = spec(1, m.Source("init"), None)
    held, layouts = snapshot(one, 10), {one.id: one.layout}
    commits = [m.Commit(10, one.id, "m10", 3)]
    assert restore_point(held, layouts, commits, one)[0].kind == "slots"
    newer = [*commits, m.Commit(12, one.id, "m12", 4, "d12")]
    assert restore_point(held, layouts, newer, one)[0] == m.Source(
        "commit", 12, one.id, manifest="m12", digest="d12"
    )
    assert restore_point(held, layouts, newer, one, bad_manifests={"m12"})[0].kind == "slots"
    distrusted, why = restore_point(held, layouts, commits, one, use_slots=False)
    assert (distrusted.manifest, "distrusted" in why) == ("m10", True)
    assert restore_point(held, layouts, [], one, use_slots=False)[0].kind == "slots", "better than nothing"
    assert restore_point((), {}, [], one)[0] == m.Source("init")


def test_states_of_unknown_generations_are_left_alone() -> None:
    one = spec(1, m.Source("init"), None)
    assert newest_slots(snapshot(one, 10), {}, None) is None


def test_layouts_are_known_from_sources_where_the_log_entry_is_missing() -> None:
    one = spec(1, m.Source("init"), None, Layout(tp=2))
    source = m.Source("slots", 4, one.id, snapshot(one, 4), layout=one.layout)
    assert known_layouts([spec(2, source, one)]) == {one.id: Layout(tp=2), gid(2): Layout(dp=2)}


# --- breaker and growth ---------------------------------------------------------------------------


def test_breaker_changes_the_remedy_before_it_gives_up() -> None:
    breaker = Breaker(100, 6)
    remedies = [breaker.record(FailureKind.WORKER_EXITED, 10, 0.0)[0] for _ in range(6)]
    assert remedies == [
        Remedy.RETRY, Remedy.EXCLUDE, Remedy.COMMIT, Remedy.SHRINK, Remedy.SHRINK, Remedy.GIVE_UP,
    ]  # fmt: skip


def test_breaker_progress_means_a_step_that_was_never_reached() -> None:
    breaker = Breaker(100, 6)
    for _ in range(3):
        breaker.record(FailureKind.FAILED, 10, 0.0)
    assert not breaker.progressed(10)
    assert breaker.record(FailureKind.FAILED, 8, 0.0)[0] is Remedy.SHRINK
    assert breaker.progressed(11)
    assert not breaker.progressed(12), "told once"
    assert breaker.record(FailureKind.FAILED, 12, 0.0)[0] is Remedy.RETRY


def test_breaker_counts_everything_in_total_but_lost_nodes_not_in_a_row() -> None:
    breaker = Breaker(7, 3)
    assert [breaker.record(FailureKind.NODE_LOST, 5, 0.0)[0] for _ in range(7)] == [Remedy.RETRY] * 7
    remedy, why = breaker.record(FailureKind.CORRUPT, 50, 0.0)
    assert remedy is Remedy.GIVE_UP
    assert "max_failures=7" in why


GROW = {
    "enabled": True,
    "ready_since": 0.0,
    "starting": 0,
    "progressed": True,
    "steps_left": 10,
    "cost_s": 1.0,
    "bigger_cost_s": 0.5,
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"enabled": False}, "off"),
        ({"ready_since": None}, "no spare"),
        ({"progressed": False}, "not finished a step"),
        ({"steps_left": 1}, "about to end"),
        ({"starting": 2}, "on their way"),
        ({"bigger_cost_s": None}, "no bigger layout"),
        ({"bigger_cost_s": 0.995}, "no gain"),
    ],
)
def test_growth_needs_every_condition(change: dict[str, object], words: str) -> None:
    assert decide(1.0, GrowthView(**GROW))[0]  # type: ignore[arg-type]
    grow, why = decide(1.0, GrowthView(**{**GROW, **change}))  # type: ignore[arg-type]
    assert not grow
    assert words in why


def test_growth_does_not_wait_for_ever_for_workers_on_their_way() -> None:
    late = GrowthView(**{**GROW, "starting": 2})  # type: ignore[arg-type]
    assert [decide(now, late)[0] for now in (9.9, 10.0, 11.0)] == [False, True, True]


@pytest.mark.parametrize("change", [{"steps_left": 2}, {"bigger_cost_s": 0.99}])
def test_growth_just_pays(change: dict[str, object]) -> None:
    why = f"{change.get('bigger_cost_s', 0.5)} s against 1 s a step by estimate"
    assert decide(1.0, GrowthView(**{**GROW, **change})) == (True, why)  # type: ignore[arg-type]


# --- membership -----------------------------------------------------------------------------------


def roster(*nodes: tuple[str, int], workers: str = "") -> Roster:
    found = Roster()
    for name, capacity in nodes:
        found.join(name, capacity, 0.0)
    for at, node in enumerate(workers.split()):
        found.workers[f"w{at}"] = RosterWorker(f"w{at}", node, "idle", float(at))
    return found


def test_workers_start_on_the_biggest_node_first_and_never_beyond_its_room() -> None:
    assert starts(roster(("a", 2), ("b", 3)), 4, 0.0) == ["b", "b", "b", "a"]
    assert starts(roster(("a", 2), ("b", 3), workers="b b a"), 4, 0.0) == ["b"]
    assert starts(roster(("a", 1)), 4, 0.0) == ["a"]


def test_no_worker_starts_on_a_draining_node_and_those_there_are_replaced() -> None:
    here = roster(("a", 2), ("b", 2), workers="a a")
    here.drain("a")
    assert starts(here, 2, 0.0) == ["b", "b"]
    assert here.usable() == []


def test_a_failed_start_holds_back_its_node_for_longer_each_time_but_once_per_batch() -> None:
    here = roster(("a", 2))
    for _ in range(2):
        here.start_failed("a", 0.0)
    assert here.nodes["a"].start_after == 1.0
    assert starts(here, 2, 0.5) == []
    here.start_failed("a", 1.0)
    assert here.nodes["a"].start_after == 3.0
    here.start_failed("gone", 1.0)


def test_the_waits_after_failed_starts_grow_to_the_last_one() -> None:
    here, now, waits = roster(("a", 2)), 0.0, []
    for _ in range(len(START_BACKOFF_S) + 2):
        here.start_failed("a", now)
        waits.append(here.nodes["a"].start_after - now)
        now = here.nodes["a"].start_after
    assert waits == [*START_BACKOFF_S, START_BACKOFF_S[-1], START_BACKOFF_S[-1]]
    assert (starts(here, 2, now - 0.1), starts(here, 2, now)) == ([], ["a", "a"])


def test_no_worker_starts_where_enough_live_and_the_dying_take_their_room() -> None:
    here = roster(("a", 3), ("b", 1), workers="a a b")
    assert [starts(here, wanted, 0.0) for wanted in (1, 2, 3, 4, 5)] == [[], [], [], ["a"], ["a"]]
    here.workers["w0"].state = "dying"
    assert [starts(here, wanted, 0.0) for wanted in (2, 3, 4)] == [[], ["a"], ["a"]]
    assert [worker.name for worker in here.usable()] == ["w1", "w2"]
    assert [node for node in ("a", "b", "c") if here.join(node, 9, 7.0)] == ["c"]
    assert [(node.capacity, node.last_seen) for node in here.nodes.values()] == [(9, 7.0)] * 3
    assert here.silent_nodes(12.0, 5.0) == []
    assert here.silent_nodes(12.1, 5.0) == ["a", "b", "c"]


def test_a_node_that_is_lost_takes_its_workers_and_may_speak_again_where_it_was_only_silent() -> None:
    here = roster(("a", 3), ("b", 1), workers="a a b")
    here.join("a", 3, 0.0, m.NodeTraits("a", 16))
    assert [worker.name for worker in here.lose("a", silent=True)] == ["w0", "w1"]
    assert (list(here.nodes), list(here.workers)) == (["b"], ["w2"])
    [(lost, names)] = here.silent.values()
    assert (lost.name, lost.capacity, lost.device_bytes, names) == ("a", 3, 16, ("w0", "w1"))
    assert here.lose("c", silent=True) == []
    assert here.lose("a", silent=False) == []
    assert here.silent == {}
    here.lose("b", silent=False)
    assert (here.silent, here.workers) == ({}, {})


def test_members_sit_together_and_keep_their_order() -> None:
    workers = list(roster(("a", 2), ("b", 3), workers="a b a b b").workers.values())
    chosen = choose_members(workers, 4)
    assert [member.node for member in chosen] == ["b", "b", "b", "a"]
    again = choose_members(reversed(workers), 4, chosen)
    assert again == chosen


def test_the_planner_is_told_where_the_workers_stand_and_their_smallest_device() -> None:
    here = roster(("a", 2), ("b", 3), ("c", 1), workers="a b a b b c")
    workers = list(here.workers.values())
    assert here.question(workers, 9) == m.LayoutQuestion(6, (3, 2, 1))
    for node, device_bytes in (("a", 16), ("b", 80), ("c", 16)):
        assert not here.join(node, here.nodes[node].capacity, 1.0, m.NodeTraits(node, device_bytes))
    assert here.question(workers, 4) == m.LayoutQuestion(4, (3, 1), 16)
    assert here.join("d", 4, 1.0, m.NodeTraits("d", 24))
    assert here.nodes["d"].device_bytes == 24
    everyone, large = here.by_device(workers)
    assert everyone == workers
    assert here.question(large, 9) == m.LayoutQuestion(3, (3,), 80)
    assert not here.join("b", 3, 2.0)  # a node whose room changed says nothing of its devices
    assert here.nodes["b"].device_bytes == 80
    del here.nodes["a"]
    assert here.question(workers, 9).device_bytes == 16  # not known of one node: those of the others count
    assert here.by_device(workers[1:5]) == [workers[1:5]]
    assert here.by_device([]) == []


# --- the log's queue ------------------------------------------------------------------------------


def test_log_entries_go_one_at_a_time_and_are_tried_again_later_and_later() -> None:
    one = spec(1, m.Source("init"), None)
    queue = AppendQueue(10.0)
    first, second = m.AppendGeneration(one), m.AppendCommit(one.id, 5, ("a",))
    queue.push(first)
    queue.push(second)
    assert queue.pump(0.0) == [first]
    assert queue.pump(1.0) == [], "in flight"
    assert queue.pump(10.0) == [first], "no reply: asked again"
    now = 10.0
    for wait in BACKOFF_S[:3]:
        assert queue.settle(m.Appended("generation", one.id, 0, error="down"), now) is None
        assert queue.wake_at == now + wait
        assert queue.pump(now + wait - 0.01) == []
        now += wait
        assert queue.pump(now) == [first]
    assert queue.settle(m.Appended("generation", one.id, 0, seq=4), now) == first
    assert queue.settle(m.Appended("generation", one.id, 0, seq=4), now) is None, "a reply seen before"
    assert queue.newest_commit() == second
    assert queue.pump(now) == [second]
    queue.drop_commits()
    assert queue.newest_commit() == second, "what is on its way cannot be taken back"
    assert queue.settle(m.Appended("commit", one.id, 5, seq=5), now) == second
    assert queue.wake_at is None


# --- commits --------------------------------------------------------------------------------------


def seal(checkpoints: CheckpointTracker, one: m.GenerationSpec, step: int, node: str) -> list[m.Command]:
    slots = tuple(slot for slot in snapshot(one, step) if slot.node == node)
    return checkpoints.sealed((step, one.id), node, slots, one.layout)


def test_a_newer_snapshot_waits_for_the_upload_under_way_but_replaces_one_that_fails() -> None:
    one = spec(1, m.Source("init"), None, Layout(tp=2))
    checkpoints = CheckpointTracker(10.0)
    seal(checkpoints, one, 10, "n0")
    assert checkpoints.plan(0.0) == [], "half of the state"
    seal(checkpoints, one, 10, "n1")
    assert [c.step for c in of(checkpoints.plan(0.0), m.Upload)] == [10, 10]
    seal(checkpoints, one, 20, "n0")
    seal(checkpoints, one, 20, "n1")
    assert checkpoints.plan(1.0) == []
    assert not checkpoints.uploaded(m.Uploaded("n0", one.id, 10, "down"), 1.0)
    commands = checkpoints.plan(1.0)
    assert [c.step for c in of(commands, m.Release)] == [10, 10]
    assert [c.step for c in of(commands, m.Upload)] == [20, 20]
    assert not checkpoints.uploaded(m.Uploaded("n0", one.id, 10), 2.0), "of the one that was given up"
    assert not checkpoints.uploaded(m.Uploaded("n0", one.id, 20), 2.0)
    assert not checkpoints.uploaded(m.Uploaded("n0", one.id, 20), 2.0), "told twice"
    assert checkpoints.uploaded(m.Uploaded("n1", one.id, 20), 2.0)
    assert checkpoints.commit() == m.AppendCommit(one.id, 20, ("n0", "n1"))
    assert len(checkpoints.settled((20, one.id), ["n0", "n1"])) == 2
    assert [c.step for c in of(seal(checkpoints, one, 20, "n1"), m.Release)] == [20], "too late"


def test_a_failed_commit_is_given_up_only_for_a_newer_whole_checkpoint() -> None:
    one = spec(1, m.Source("init"), None, Layout(tp=2))
    checkpoints = CheckpointTracker(10.0)
    failed = (10, one.id)
    for node in ("n0", "n1"):
        seal(checkpoints, one, 10, node)
    assert not checkpoints.outdated(failed), "none is pending"
    checkpoints.plan(0.0)
    assert not checkpoints.outdated(failed), "there is no newer one"
    seal(checkpoints, one, 20, "n0")
    assert not checkpoints.outdated(failed), "half of the newer one"
    seal(checkpoints, one, 20, "n1")
    assert not checkpoints.outdated((9, one.id)), "another state is pending"
    assert checkpoints.pending is not None
    assert checkpoints.outdated(failed)
    assert checkpoints.pending is None
    assert not checkpoints.outdated(failed)


def test_a_lost_node_or_slot_plans_the_checkpoint_anew_from_the_replicas() -> None:
    one = spec(1, m.Source("init"), None, Layout(dp=4))
    checkpoints = CheckpointTracker(10.0)
    for node in ("n0", "n1"):
        seal(checkpoints, one, 10, node)
    assert [c.node for c in of(checkpoints.plan(0.0), m.Upload)] == ["n0"]
    checkpoints.node_lost("n0")
    assert [c.node for c in of(checkpoints.plan(1.0), m.Upload)] == ["n1"]
    assert checkpoints.pending is not None
    checkpoints.slot_lost("n1", checkpoints.pending.parts["n1"][0], checkpoints.pending.state)
    assert checkpoints.plan(2.0) == []
    assert checkpoints.pending is None
    assert checkpoints.wake_at is None


def test_a_rewind_voids_the_checkpoints_after_it() -> None:
    one = spec(1, m.Source("init"), None)
    checkpoints = CheckpointTracker(10.0)
    for step in (10, 20):
        for node in ("n0", "n1"):
            seal(checkpoints, one, step, node)
    checkpoints.plan(0.0)
    assert checkpoints.pending is not None
    assert checkpoints.pending.state[0] == 20
    two = spec(2, m.Source("commit", 10, one.id, manifest="m10"), one)
    checkpoints.rewound(two)
    assert {c.step for c in of(checkpoints.release_void(), m.Release)} == {20}
    assert checkpoints.release_void() == []
    assert checkpoints.pending is None


def test_failures_of_another_day_do_not_count() -> None:
    """A run of months outlives any number of failures that come one by one."""
    breaker = Breaker(2, 100)
    hour_s = 3600.0
    for day in range(100):
        for hour in (0, 12):
            at = (24.0 * day + hour) * hour_s
            assert breaker.record(FailureKind.NODE_LOST, day, at)[0] is Remedy.RETRY
    assert breaker.total(at) == 2
    assert breaker.record(FailureKind.NODE_LOST, 100, at + hour_s)[0] is Remedy.GIVE_UP
