"""The node whose rendezvous store a generation uses."""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.store_home import LEAST_ASKED_S, StoreHomes, StoreSearch, asked_s
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import gid

MEMBERS = tuple(m.Member(f"w{at}", node) for at, node in enumerate(("n1", "n1", "n2")))
SPEC = m.GenerationSpec(gid(1), MEMBERS, Layout(dp=3), m.Source("init"), "test")


def test_the_home_moves_once_its_stores_failed_twice_and_anothers_did_not() -> None:
    homes = StoreHomes()
    assert homes.home(SPEC) == "n1", "rank 0's"
    homes.failed("n1")
    assert homes.home(SPEC) == "n1", "once may be chance"
    homes.failed("n1")
    assert homes.home(SPEC) == "n2"
    homes.failed("n2")
    assert homes.home(SPEC) == "n2"
    homes.failed("n2")
    assert homes.home(SPEC) == "n1", "both failed twice"
    homes.forget("n2")
    assert homes.home(SPEC) == "n2", "its successor is another"


def test_replaced_stores_count_and_are_never_counted_twice() -> None:
    homes = StoreHomes()
    homes.answered("n1", 1)
    homes.answered("n1", 1)
    assert homes.home(SPEC) == "n1"
    homes.answered("n1", 2)
    assert homes.home(SPEC) == "n2"
    homes.answered("n1", 0)
    assert homes.home(SPEC) == "n2", "what was heard before stays known"


def test_a_silent_node_is_left_for_another_however_often_that_ones_stores_failed() -> None:
    homes = StoreHomes()
    for _ in range(3):
        homes.failed("n2")
    assert homes.home(SPEC, lambda node: node == "n1") == "n2"
    assert homes.home(SPEC, lambda node: True) == "n1", "all are: as if none were"


def test_another_node_is_asked_before_a_silent_one_counts_as_lost() -> None:
    assert asked_s(5.0) == 2.5
    assert asked_s(0.1) == LEAST_ASKED_S, "who is asked too often has no thread left"


def test_members_that_were_not_called_yet_are_called_before_they_are_told_to_leave() -> None:
    search = StoreSearch()
    hard, boundary = (m.Interrupt("w0", SPEC.id, mode) for mode in ("hard", "boundary"))
    assert search.given_up(hard) is None, "none is looked for"
    search.begin(SPEC)
    assert search.goes_on(SPEC.id)
    assert search.given_up(boundary) is None, "it may wait until they run"
    assert search.given_up(m.Interrupt("w0", gid(9), "hard")) is None, "of another generation"
    assert search.given_up(hard) == SPEC
    assert search.given_up(hard) is None, "once, for all members"
    assert not search.goes_on(SPEC.id)
    assert not search.end(SPEC.id), "an address that comes now is of no use"
    search.begin(SPEC)
    assert search.end(SPEC.id)
    assert search.given_up(hard) is None, "they were called"
