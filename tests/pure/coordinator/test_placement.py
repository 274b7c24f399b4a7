"""Replicas of a state group share a failure domain only where no order of the nodes would part them."""

from __future__ import annotations

import time
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.placement import spread
from picotron_ray.layout.layout import Layout


def members(sizes: list[int]) -> tuple[m.Member, ...]:
    places = [(node, at) for node, size in enumerate(sizes) for at in range(size)]
    return tuple(m.Member(f"w{node}-{at}", f"n{node}") for node, at in places)


def lost_with_a_domain(order: tuple[m.Member, ...], layout: Layout, domains: dict[str, str]) -> int:
    """State groups of which some domain has all replicas, counted from the definition."""
    found = 0
    for group in range(layout.state_groups):
        ranks = [rank for rank in range(layout.world_size) if layout.state_group(rank) == group]
        found += len({domains.get(order[rank].node, order[rank].node) for rank in ranks}) == 1
    return found


def racks(letters: str) -> dict[str, str]:
    return {f"n{at}": letter for at, letter in enumerate(letters) if letter != "-"}


@pytest.mark.parametrize(
    ("layout", "letters", "best"),
    [
        (Layout(dp=2, pp=2, tp=2), "AABB", 0),  # each stage on both racks
        (Layout(dp=4, tp=2, zero=1, replicate=2), "ABAB", 0),  # both copies of each half on both racks
        (Layout(dp=2, pp=2, tp=2), "AAAB", 2),  # one stage at most
        (Layout(dp=2, pp=2, tp=2), "AAAA", 4),  # nowhere to go
        (Layout(dp=2, pp=2, tp=2), "A---", 0),  # without a label a node is its own domain
    ],
)
def test_racks_take_turns_as_the_layout_asks(layout: Layout, letters: str, best: int) -> None:
    order = spread(members([2] * 4), layout, racks(letters))
    assert set(order) == set(members([2] * 4))
    assert lost_with_a_domain(order, layout, racks(letters)) == best


def test_an_order_that_is_good_stays() -> None:
    layout = Layout(dp=2, pp=2, tp=2)
    order = members([2] * 4)
    assert spread(order, layout, racks("ABAB")) == order
    assert spread(order, layout, {}) == order
    assert spread(order, Layout(dp=8, zero=3), racks("AABB")) == order, "nothing is held twice"


def test_only_nodes_of_one_size_change_places() -> None:
    layout = Layout(dp=3, tp=2)
    order = spread(members([4, 2]), layout, racks("AB"))
    assert [member.node for member in order] == ["n0"] * 4 + ["n1"] * 2


@given(
    layout=st.sampled_from(
        [
            Layout(dp=2, pp=2), Layout(dp=2, pp=3), Layout(dp=3, pp=2), Layout(dp=4, zero=2, replicate=2),
            Layout(dp=6, zero=1, replicate=3), Layout(dp=6, zero=1, replicate=2), Layout(dp=2, cp=2),
        ]
    ),
    letters=st.text("AB-C", min_size=6, max_size=6),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_no_order_of_up_to_six_nodes_is_better(layout: Layout, letters: str) -> None:
    count = layout.world_size
    here, domains = members([1] * count), racks(letters[:count])
    found = lost_with_a_domain(spread(here, layout, domains), layout, domains)
    assert found == min(lost_with_a_domain(order, layout, domains) for order in permutations(here))


def test_a_thousand_ranks_are_placed_in_milliseconds() -> None:
    layout = Layout(dp=16, tp=8, pp=8)
    domains = {f"n{at}": f"rack{at // 16}" for at in range(128)}
    spent_s: list[float] = []
    for _ in range(3):  # a busy machine may stretch one
        began = time.process_time()
        order = spread(members([8] * 128), layout, domains)
        spent_s.append(time.process_time() - began)
    assert min(spent_s) < 0.05
    assert lost_with_a_domain(order, layout, domains) == 0
