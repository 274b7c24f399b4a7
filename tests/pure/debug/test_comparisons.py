"""What hashes of one step say: the first difference, the first race, and what to do next."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.debug import inconsistency, races
from picotron_ray.layout.layout import Layout


def report(**stages: list[tuple[str, str, int]]) -> dict[str, Any]:
    return dict(stages)


SAME = report(
    before=[("w", "a", 1)], gradients=[("g", "a", 1)], after=[("w", "a", 2)], activations=[("x", "m", 1)]
)


def test_a_cause_comes_before_what_follows_from_it() -> None:
    other = {**SAME, "gradients": [("g", "a", 9)], "after": [("w", "a", 9)], "activations": [("x", "m", 9)]}
    found, counts = inconsistency.compared({0: SAME, 1: other})
    assert [place.stage for place in found] == ["gradients", "after", "activations"]
    assert counts == {"before": 1, "gradients": 1, "after": 1, "activations": 1}
    assert "race" in inconsistency.suggestions(found, counts, "run")[0]


def test_ranks_with_other_keys_and_calls_are_not_compared() -> None:
    one = report(activations=[("x:0", "m", 1), ("x:0", "m", 2)])
    other = report(activations=[("x:0", "m", 1), ("x:0", "m", 3)])
    third = report(activations=[("x:1", "m", 7)])
    found, counts = inconsistency.compared({0: one, 1: other, 2: third})
    assert counts["activations"] == 2
    assert [place.groups for place in found] == [((0,), (1,))]


def test_a_majority_names_the_others_and_their_nodes_come_last_of_what_to_do() -> None:
    wrong = {**SAME, "before": [("w", "a", 5)]}
    found, counts = inconsistency.compared({0: SAME, 1: wrong, 2: SAME})
    assert found[0].suspects == (1,)
    assert str(found[0]) == "state before the step: a: ranks 0, 2 differ from ranks 1; suspected: 1"
    assert "ranks 1 (`picotron-ray drain`)" in inconsistency.suggestions(found, counts, "run")[-1]


@pytest.mark.parametrize("stages", [{}, {"activations": None}])
def test_where_nothing_can_be_compared_it_says_so(stages: dict[str, Any]) -> None:
    found, counts = inconsistency.compared({0: stages, 1: stages})
    (text,) = inconsistency.suggestions(found, counts, "run")
    assert text.startswith("no two ranks hold or compute the same")
    found, counts = inconsistency.compared({0: SAME, 1: SAME})
    assert inconsistency.suggestions(found, counts, "run")[0].startswith("nothing differs in this step")


# --- races ------------------------------------------------------------------------------------------


def ran(writes: Any = (), **changed: str) -> dict[str, Any]:
    """What a rank tells; of a pass, the place from which on the second run differs."""
    runs: list[dict[str, Any]] = [{}, {}]
    for kind in races.PASSES:
        begins = "abc".index(changed[kind]) if kind in changed else 3
        runs[0][kind] = [(name, at) for at, name in enumerate("abc")]
        runs[1][kind] = [(name, at if at < begins else at + 10) for at, name in enumerate("abc")]
    return {"writes": list(writes), "runs": runs}


def told(reports: dict[int, Any], layout: Layout) -> list[tuple[int, str, str]]:
    return [(race.rank, race.kind, race.place) for race in races.races(reports, layout)]


def test_each_replica_tells_of_its_own_races() -> None:
    reports = {
        0: ran(),
        1: ran(forward="b", backward="a", gradients="a"),
        2: ran(backward="c", gradients="a"),
    }
    assert told(reports, Layout(dp=3)) == [(1, "forward", "b"), (2, "backward", "c")]


def test_of_ranks_that_share_rows_the_first_place_counts() -> None:
    tensor = {0: ran(forward="c"), 1: ran(forward="b")}
    assert told(tensor, Layout(tp=2)) == [(1, "forward", "b")]
    pipeline = {0: ran(backward="a"), 1: ran(forward="c", backward="a")}
    assert told(pipeline, Layout(pp=2)) == [(1, "forward", "c")]
    back = {0: ran(backward="a"), 1: ran(backward="c")}
    assert told(back, Layout(pp=2)) == [(1, "backward", "c")], "the last stage goes back first"


def test_sums_alone_are_a_race_of_communication() -> None:
    reports = {0: ran(gradients="b"), 1: ran(gradients="b")}
    assert told(reports, Layout(dp=2)) == [(0, "gradients", "b"), (1, "gradients", "b")]
    assert "look at comm.gradients" in races.suggestions(races.races(reports, Layout(dp=2)), "run")[0]


def test_a_write_into_a_sum_is_named_with_its_time() -> None:
    reports = {0: ran(gradients="a"), 1: ran([("the step", "w (bucket 0)"), ("run 1", "w (bucket 0)")])}
    found = races.races(reports, Layout(dp=2))
    assert [str(race) for race in found] == [
        "rank 1: gradient of w (bucket 0) was written while it was summed, in the step, and 1 more places"
    ]
    hints = races.suggestions(found, "run")
    assert "comm.gradients" in hints[0]
    assert "only rank 1" in hints[1]


def test_another_number_of_calls_is_a_difference() -> None:
    one = ran()
    one["runs"][1]["forward"] = one["runs"][1]["forward"][:2]
    assert told({0: one}, Layout()) == [(0, "forward", "one pass: the numbers of calls differ")]


def test_without_a_race_it_says_so() -> None:
    assert "no race in this step" in races.suggestions(races.races({0: ran()}, Layout()), "run")[0]
