"""State groups that hold a member's boxes: all of them, no others, from the writers' layout alone."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.state_copies import ReadingOrder
from picotron_ray.layout.layout import Layout, Zero
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.models.parameters import ParameterSpec, Part
from picotron_ray.parallel.shard_boxes import is_primary, local_box, local_boxes
from picotron_ray.parallel.share_holders import ShareHolders
from picotron_ray.planner.stage_partition import partition
from picotron_ray.runtime.worker.slot_restore import MissingBoxes

LAYERS = 4
SCALE = "scaler/loss_scale"


def spec(
    name: str, shape: tuple[int, ...], tp_dim: int | None, at: int | Part, **more: bool
) -> ParameterSpec:
    layer = at if isinstance(at, int) else None
    part: Part = "block" if isinstance(at, int) else at
    return ParameterSpec(name, shape, layer, part, tp_dim, True, 0.02, **more)


def table(hidden: int, inner: int, vocabulary: int, tied: bool, experts: int) -> list[ParameterSpec]:
    """A decoder's kinds of parameters: cut either way, replicated, untrained, stacks of experts, tied."""
    found = [spec("embed", (vocabulary, hidden), 0, "embed", embedding=True)]
    for layer in range(LAYERS):
        found += [
            spec(f"{layer}.q", (hidden, hidden), 0, layer),
            spec(f"{layer}.o", (hidden, hidden), 1, layer),
            spec(f"{layer}.n", (hidden,), None, layer),
        ]
        if experts:
            found += [
                spec(f"{layer}.router", (experts, hidden), None, layer),
                spec(f"{layer}.bias", (experts,), None, layer, trained=False),
                spec(f"{layer}.up", (experts, inner, hidden), 1, layer, expert=True),
                spec(f"{layer}.down", (experts, hidden, inner), 2, layer, expert=True),
            ]
        else:
            found += [
                spec(f"{layer}.up", (inner, hidden), 0, layer),
                spec(f"{layer}.down", (hidden, inner), 1, layer),
            ]
    found.append(spec("norm", (hidden,), None, "head"))
    if tied:
        return [*found, spec("embed", (vocabulary, hidden), 0, "head", copy=True)]
    return [*found, spec("head", (vocabulary, hidden), 0, "head")]


def bounds(layout: Layout) -> tuple[tuple[int, int], ...]:
    return partition([1.0] * LAYERS, 0.0, 0.5, layout.stages)


def held(specs: list[ParameterSpec], layout: Layout, rank: int) -> list[tuple[ParameterSpec, Shard]]:
    """What a rank holds, as the engine builds it: by stages."""
    stages = layout.rank_stages(layout.coordinates(rank).pp)
    ranges, found = bounds(layout), list[tuple[ParameterSpec, Shard]]()
    for each in specs:
        if each.part == "embed":
            here = 0 in stages
        elif each.part == "head":
            here = layout.stages - 1 in stages and not (each.copy and 0 in stages)
        else:
            here = any(ranges[s][0] <= (each.layer or 0) < ranges[s][1] for s in stages)
        for box in local_boxes(each, layout, rank):
            if here and box.numel:
                found.append((each, Shard(each.name, "float32", each.shape, box)))
    return found


def written(specs: list[ParameterSpec], layout: Layout, rank: int) -> list[Shard]:
    return [shard for each, shard in held(specs, layout, rank) if is_primary(each, layout, rank)]


def wanted(specs: list[ParameterSpec], layout: Layout, rank: int) -> list[Shard]:
    """Weights, a moment of each, and the loss scale."""
    found = [shard for each, shard in held(specs, layout, rank)]
    moments = [Shard(f"exp_avg/{s.name}", s.dtype, s.global_shape, s.box) for s in found]
    return [*found, *moments]


def holders(specs: list[ParameterSpec], layout: Layout) -> ShareHolders:
    return ShareHolders(specs, layout, bounds(layout))


@st.composite
def layouts(draw: st.DrawFn, experts: int) -> Layout:
    tp, pp, cp = (
        draw(st.sampled_from((1, 2, 3, 4))),
        draw(st.sampled_from((1, 2, 4))),
        draw(st.integers(1, 2)),
    )
    ep = draw(st.sampled_from([n for n in (1, 2, 4) if experts and experts % n == 0] or [1]))
    zero = draw(st.sampled_from(get_args(Zero)))
    replicate = draw(st.sampled_from((1, 2))) if zero else 1
    dp = ep * replicate * draw(st.integers(1, 5))
    interleaved = pp == 2 and draw(st.booleans())
    schedule, stages = ("interleaved-1f1b", 2) if interleaved else ("1f1b", 1)
    placed = st.one_of(st.just(()), st.permutations(range(experts)).map(tuple))
    order = draw(st.lists(placed, max_size=LAYERS).map(tuple)) if ep > 1 else ()
    return Layout(dp, tp, pp, cp, ep, zero, replicate, schedule, stages, expert_order=order)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), experts=st.sampled_from((0, 4, 8)), tied=st.booleans())
def test_they_are_exactly_those_that_wrote_something_of_it(
    data: st.DataObject, experts: int, tied: bool
) -> None:
    """Against all that all ranks wrote, by brute force; together it is all of what is wanted."""
    size = st.sampled_from((4, 5, 12, 17))
    specs = table(data.draw(size), data.draw(size), data.draw(size), tied, experts)
    old, new = data.draw(layouts(experts)), data.draw(layouts(experts))
    rank = data.draw(st.integers(0, new.world_size - 1))
    want = wanted(specs, new, rank)
    mine: dict[str, list[Box]] = defaultdict(list)
    for shard in want:
        mine[shard.name].append(shard.box)
    found = holders(specs, old).groups(want)
    expected, missing = set(), MissingBoxes(s for s in want if "/" not in s.name)
    for writer in range(old.world_size):
        group = old.state_group(writer)
        wrote = written(specs, old, writer)
        if any(box.intersect(s.box) is not None for s in wrote for box in mine[s.name]):
            expected.add(group)
        if group in found:
            missing.take([SimpleNamespace(shard=shard) for shard in wrote])  # type: ignore[misc]
    assert found == expected
    assert not missing


def test_what_belongs_to_no_parameter_is_the_first_groups() -> None:
    scale = Shard(SCALE, "float32", (2,), local_box(spec("s", (2,), None, 0), Layout(), 0))
    assert holders(table(4, 4, 4, False, 0), Layout(dp=4, zero=1)).groups([scale]) == {0}


LARGE = table(8192, 28672, 128256, False, 0)
MIXED = table(2048, 768, 151936, False, 128)
CHANGES = [
    (LARGE, Layout(dp=512, zero=3), Layout(dp=512, zero=3), 1),
    (LARGE, Layout(dp=504, zero=3), Layout(dp=512, zero=3), 9),
    (LARGE, Layout(dp=512, zero=3), Layout(dp=504, zero=3), 9),
    (LARGE, Layout(dp=63, tp=8, zero=1), Layout(dp=64, tp=8, zero=1), 9),
    (LARGE, Layout(dp=64, tp=8, zero=1), Layout(dp=128, tp=4, zero=1), 9),
    (LARGE, Layout(dp=64, tp=4, pp=2, zero=1), Layout(dp=60, tp=4, zero=1), 18),
    # 16 experts in 64 parts of each; 63 divide nothing of them, so that a member wants one as a whole
    (MIXED, Layout(dp=512, ep=8, zero=1), Layout(dp=504, ep=8, zero=1), 68),
    (MIXED, Layout(dp=512, ep=8, zero=1), Layout(dp=256, ep=8, zero=1), 9),
    (LARGE, Layout(dp=2040 * 8, zero=3), Layout(dp=2048 * 8, zero=3), 9),
]


@pytest.mark.parametrize(("specs", "old", "new", "most"), CHANGES, ids=lambda value: str(value)[:24])
def test_a_member_opens_few_slots_however_many_there_are(
    specs: list[ParameterSpec], old: Layout, new: Layout, most: int
) -> None:
    """Each worker is the only one that holds its share: without this it opened nearly every slot."""
    node, one = lambda rank: f"n{rank // 8:05d}", m.GenerationId(1, 1)
    rank_of = dict[int, int]()
    for writer in range(old.world_size):
        rank_of.setdefault(old.state_group(writer), writer)
    slots = tuple(
        m.SlotInfo(node(writer), f"w{writer}.0.slot", one, 10, writer, (m.Fragment(group),))
        for group, writer in rank_of.items()
    )
    members = tuple(m.Member(f"w{rank}", node(rank)) for rank in range(new.world_size))
    source = m.Source("slots", 10, one, slots, layout=old)
    known, spec_ = holders(specs, old), m.GenerationSpec(m.GenerationId(1, 2), members, new, source, "grow")
    for rank in range(3, new.world_size, max(1, new.world_size // 8)):
        want = wanted(specs, new, rank)
        needed = known.groups(want)
        missing, opened = MissingBoxes(s for s in want if "/" not in s.name), 0
        for group in ReadingOrder(spec_, rank).groups(needed):
            opened += 1
            wrote = written(specs, old, rank_of[group])
            missing.take([SimpleNamespace(shard=shard) for shard in wrote])  # type: ignore[misc]
            if not missing:
                break
        assert opened == len(needed) <= most


def test_every_share_is_needed_by_a_member_that_holds_all() -> None:
    specs, old = table(16, 16, 16, True, 0), Layout(dp=4, tp=2, pp=2, zero=1)
    groups: dict[int, int] = defaultdict(int)
    for group in holders(specs, old).groups(wanted(specs, Layout(), 0)):
        groups[group] += 1
    assert sorted(groups) == list(range(old.state_groups))
