"""Copies of a state: each member reads its own node's, and who has none there is sent to all in turn."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode_spec, plain
from picotron_ray.coordinator.policies.restore_point import restore_point
from picotron_ray.coordinator.policies.state_copies import ReadingOrder, find_copies, with_copies
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import World, flush, gid, job, of
from tests.support.selection import also_deep

EACH = 8


def members(nodes: int, first: int = 0) -> tuple[m.Member, ...]:
    return tuple(
        m.Member(f"w1-{i}", f"{i // EACH:056x}") for i in range(first * EACH, (first + nodes) * EACH)
    )


def sealed(spec: m.GenerationSpec, step: int) -> list[m.SlotInfo]:
    """As ``coordinator_world.snapshot``, for thousands of members."""
    mates: dict[tuple[str, int], list[int]] = defaultdict(list)
    for rank, member in enumerate(spec.members):
        mates[member.node, spec.layout.state_group(rank)].append(rank)
    return [
        m.SlotInfo(
            node,
            f"{spec.members[rank].worker}.0.slot",
            spec.id,
            step,
            rank,
            (m.Fragment(group, ranks.index(rank), len(ranks)),),
        )
        for (node, group), ranks in mates.items()
        for rank in ranks
    ]


def spec_of(n: int, of_members: tuple[m.Member, ...], layout: Layout, source: m.Source) -> m.GenerationSpec:
    return m.GenerationSpec(gid(n), of_members, layout, source, "test")


def resumed(layout: Layout, nodes: int, lost: int = 0, new: int = 0) -> m.GenerationSpec:
    """A generation of that layout after one of ``nodes`` nodes: ``lost`` of them went, ``new`` ones came."""
    one = spec_of(1, members(nodes), layout, m.Source("init"))
    slots = [slot for slot in sealed(one, 100) if int(slot.node, 16) >= lost]
    point, _ = restore_point(slots, {one.id: layout}, (), one)
    assert point.kind == "slots"
    return spec_of(2, members(nodes - lost + new, lost), layout, with_copies(point, slots))


def first_nodes(spec: m.GenerationSpec, rank: int, group: int) -> set[str]:
    return {info.node for info in next(ReadingOrder(spec, rank).candidates(group))}


def test_where_each_node_holds_all_each_member_reads_its_own() -> None:
    two = resumed(Layout(dp=130 * EACH), 130)
    assert len({slot.node for slot in two.source.slots}) == 1
    assert len(two.source.copies) == 130
    for rank, member in enumerate(two.members):
        order = ReadingOrder(two, rank)
        assert order.groups() == [0]
        assert not order.reads_far
        found = next(order.candidates(0))
        assert {info.node for info in found} == {member.node}
        assert len(found) == EACH, "the replicas of a node share the copying"


CASES = [
    (Layout(dp=130 * EACH), 1),
    (Layout(dp=130 * EACH), 20),
    *also_deep((Layout(dp=130, tp=EACH), 65), (Layout(dp=65, tp=EACH, pp=2), 20)),
]


@pytest.mark.parametrize(("layout", "new"), CASES)
def test_members_of_new_nodes_are_spread_over_all_copies(layout: Layout, new: int) -> None:
    two = resumed(layout, 130, lost=new, new=new)
    readers: Counter[str] = Counter()
    for rank, member in enumerate(two.members):
        order = ReadingOrder(two, rank)
        assert order.reads_far
        if int(member.node, 16) >= 130:
            readers.update(set().union(*(first_nodes(two, rank, group) for group in order.groups())))
    holders = Counter(group for copy in two.source.copies for group in copy.groups)
    assert len(holders) == layout.state_groups
    assert max(readers.values()) == -(-new * EACH // min(holders.values()))


def test_where_a_copy_is_lost_each_reader_goes_on_to_another_one() -> None:
    two = resumed(Layout(dp=130 * EACH), 130, lost=20, new=20)
    newcomers = [rank for rank, member in enumerate(two.members) if int(member.node, 16) >= 130]
    gone = first_nodes(two, newcomers[0], 0)
    after: Counter[str] = Counter()
    for rank in newcomers:
        sets = [{info.node for info in found} for found in ReadingOrder(two, rank).candidates(0)]
        after.update(next(nodes for nodes in sets if not nodes & gone))
        assert len({node for nodes in sets for node in nodes}) == 110, "it can read all of them"
    assert max(after.values()) <= 3


def test_the_order_is_the_same_in_every_process_and_after_the_log() -> None:
    two = resumed(Layout(dp=10, tp=EACH), 10, lost=2, new=2)
    again = decode_spec(json.loads(json.dumps(plain(two))))
    assert again == two
    for rank in (0, 64, 79):
        for group in range(EACH):
            assert list(ReadingOrder(again, rank).candidates(group)) == list(
                ReadingOrder(two, rank).candidates(group)
            )


def test_shares_that_one_node_alone_holds_are_read_from_there_nearest_first() -> None:
    layout = Layout(dp=4 * EACH, zero=1)
    two = resumed(layout, 4)
    assert two.source.copies == ()
    order = ReadingOrder(two, 2 * EACH + 3)
    groups = order.groups()
    assert set(groups[:EACH]) == {layout.state_group(rank) for rank in range(2 * EACH, 3 * EACH)}
    assert groups[0] == layout.state_group(2 * EACH + 3)
    assert sorted(groups) == list(range(layout.state_groups))
    assert order.reads_far


def test_a_node_that_holds_a_part_of_a_share_has_no_copy_of_it() -> None:
    one = spec_of(1, members(3), Layout(dp=3 * EACH), m.Source("init"))
    held = sealed(one, 100)
    assert [int(copy.node, 16) for copy in find_copies(held[1:])] == [1, 2]
    assert find_copies(held[: EACH + 3]) == (), "one copy alone is no choice"
    whole = flush(one, 100, [EACH + 1])
    copies = find_copies((*held[:EACH], *held[EACH + 3 : 2 * EACH], *whole))
    assert [(int(copy.node, 16), len(copy.slots)) for copy in copies] == [(0, EACH), (1, 1)]


def test_the_spec_of_16384_workers_grows_by_some_bytes_a_node() -> None:
    for layout in (Layout(dp=2048 * EACH), Layout(dp=2048, tp=EACH)):
        two = resumed(layout, 2048)
        with_them = len(json.dumps(plain(two)))
        without = len(json.dumps(plain(replace(two, source=replace(two.source, copies=())))))
        assert len(two.source.copies) == 2048
        assert with_them - without < 300 * 2048 < without / 2, f"{with_them} bytes, {without} without them"


def test_a_copy_that_is_damaged_or_cannot_be_reached_is_not_read_again() -> None:
    world = World(job(cluster__max_workers=3))
    one = world.up(("a", 1), ("b", 1), ("c", 1))
    held = flush(one, 50, [0, 1, 2])
    peers = [m.Outcome(x.worker, one.id, FailureKind.PEER_LOST, 50) for x in one.members]
    two = world.run(world.answer(world.send(*peers), held))
    assert {slot.node for slot in two.source.slots} == {"a"}
    assert [copy.node for copy in two.source.copies] == ["a", "b", "c"]
    (name,) = two.source.copies[1].slots
    bad = world.send(m.Outcome(two.members[1].worker, two.id, FailureKind.FAILED, -1, f"corrupt:{name}"))
    assert of(bad, m.Quarantine) == [m.Quarantine("b", name, one.id, 50)]
    others = [m.Outcome(x.worker, two.id, FailureKind.PEER_LOST, -1) for x in two.members]
    three = world.run(world.answer(bad + world.send(*others), held))
    assert [copy.node for copy in three.source.copies] == ["a", "c"]
    names = ",".join(copy.slots[0] for copy in three.source.copies)
    far = world.send(
        m.Outcome(three.members[1].worker, three.id, FailureKind.FAILED, -1, f"unreachable:{names}")
    )
    others = [m.Outcome(x.worker, three.id, FailureKind.PEER_LOST, -1) for x in three.members]
    (four,) = of(world.answer(far + world.send(*others), held), m.RunGeneration)
    assert four.spec.source.kind == "init", "no copy is left"
