"""Real processes that stand still, for a planted reason: the verdict names it with rank and place."""

from __future__ import annotations

import inspect
import time
from typing import Any

import pytest

from picotron_ray.debug.hang_verdict import HangVerdict, judge_hang
from picotron_ray.debug.rank_record import read_rank
from picotron_ray.debug.verdict_lines import verdict_lines
from tests.support.gloo import planted_hangs
from tests.support.gloo.failed_link import cut, linked_ranks
from tests.support.gloo.planted_hangs import stand_still, step_well
from tests.support.gloo.pool import Pool
from tests.support.gloo.shaped_link import may_make_namespaces, shaped


def line_of(mark: str) -> str:
    """File and line of what is planted."""
    lines = inspect.getsource(planted_hangs).splitlines()
    [number] = [at for at, line in enumerate(lines, 1) if f"# planted: {mark}" in line]
    return f"{planted_hangs.__file__}:{number} "


def judged(told: list[dict[str, Any]]) -> HangVerdict:
    found = judge_hang([read_rank(entry) for entry in told], least_s=0.0)
    print("\n".join(verdict_lines(found.plain(), "deadlock")))
    return found


def test_another_kind_of_collective_is_named_with_rank_and_place(pool: Pool) -> None:
    found = judged(pool.run(3, stand_still, "other_kind", True))
    first = found.findings[0]
    assert (first.kind, first.ranks, first.details["what"]) == ("mismatch", (1,), "kind")
    assert "rank 1 on node node0 called broadcast of 8 float32 at " + line_of("kind") in first.text
    assert "ranks 0, 2 on nodes node0, node1 called all_reduce of 8 float32" in first.text
    assert first.details["number"] == 9, "after two in which ranks meet, and two in each of three steps"


def test_another_order_is_named(pool: Pool) -> None:
    found = judged(pool.run(3, stand_still, "other_order", True))
    first = found.findings[0]
    assert (first.kind, first.ranks, first.details["what"]) == ("mismatch", (2,), "order")
    assert "rank 2 calls operations 9 and 10 the other way round" in first.text
    assert "rank 2 on node node1 called all_gather of 6 float32 at" in first.text
    assert "in <lambda>" in first.text, "where it was called"
    assert {record.place.partition(" ")[0] for record in found.ranks} == {line_of("order").strip()}


def test_messages_that_cross_are_a_deadlock(pool: Pool) -> None:
    found = judged(pool.run(2, stand_still, "crossed_messages", True))
    [first] = found.findings
    assert (first.kind, first.ranks) == ("deadlock", (0, 1))
    place = line_of("both receive first")
    assert f"rank 0 on node node0 waits for rank 1 in recv from rank 1 of 7 float32 at {place}" in first.text
    assert f"rank 1 on node node0 waits for rank 0 in recv from rank 0 of 7 float32 at {place}" in first.text
    assert "batch_isend_irecv" in found.suggestions[0]


def test_groups_that_are_used_the_other_way_round_are_a_deadlock(pool: Pool) -> None:
    [first] = judged(pool.run(2, stand_still, "crossed_groups", False)).findings
    assert (first.kind, first.ranks) == ("deadlock", (0, 1))
    assert line_of("groups the other way round") in first.text, "by the stacks: no place was recorded"


def test_a_late_rank_is_named_with_its_place(pool: Pool) -> None:
    found = judged(pool.run(4, stand_still, "late_rank", True))
    [first] = found.findings
    assert (first.kind, first.ranks, first.details["waiting"]) == ("late", (1,), [0, 2, 3])
    assert "rank 1 on node node0 is late at " + line_of("asleep") in first.text
    assert [step["for"] for step in found.plain()["waits"]] == [1, 1, 1]


@pytest.mark.parametrize("places", [False, True])
def test_ranks_that_step_have_nothing_wrong(pool: Pool, places: bool) -> None:
    found = judged(pool.run(4, step_well, places))
    assert found.findings == []
    assert len({(one.kind, one.peer >= 0) for one in found.ranks[0].operations}) == 4
    assert all(one.done for one in found.ranks[0].operations if one.peer >= 0)
    assert bool(found.ranks[0].operations[0].place) is places


@pytest.mark.deep
def test_a_link_that_is_cut_is_named_by_its_counters() -> None:
    if not may_make_namespaces():
        pytest.skip("may not make network namespaces")
    with shaped(1000) as link, linked_ranks(link) as ranks:
        cut(link)
        deadline = time.monotonic() + 60
        while True:
            found = judged([rank.told() for rank in ranks])
            failed = [finding for finding in found.findings if finding.kind == "link"]
            if failed and failed[0].details["counters"] and failed[0].details["bytes"]:
                break
            assert time.monotonic() < deadline
            time.sleep(0.5)
    [first] = found.findings
    assert first.ranks == (0, 1)
    assert first.details["bytes"] == 2**20
    assert max(end["retransmits"] for end in first.details["counters"].values()) >= 2
    assert first.details["last_good"] == "all_reduce of 262144 float32"
    assert first.details["last_good_s"] > 0
    assert "sent again" in first.text
