"""``bench comm`` by hand: its plan, its figures, and what it refuses. The selector's model."""

from __future__ import annotations

import random
from typing import Any

import pytest

from picotron_ray.bench.comm import bench, report
from picotron_ray.bench.comm.bench import CommOptions
from picotron_ray.bench.comm.figures import COLLECTIVES, STRATEGIES, bus_factor, near_share, selection
from picotron_ray.bench.comm.room import room_bytes
from picotron_ray.comm.reducers.selector import LinearTime, Selector, Way
from picotron_ray.errors import ConfigError

OPTIONS: dict[str, Any] = {
    "groups": "2,4",
    "sizes": "1KiB,1MiB",
    "collectives": "all-reduce",
    "strategies": "all",
    "budget_s": 60.0,
    "device": "cpu",
}
RING, TREE = Way("ring", "data", "gloo"), Way("tree", "data", "gloo")


def event(number: int, rank: int, strategy: str, seconds: list[float] | None, **more: Any) -> dict[str, Any]:
    timed = {} if seconds is None else {"seconds": seconds, "warmups": 10, "sent_bytes": 100 + rank}
    place = {"what": "cell", "number": number, "rank": rank, "collective": "all-reduce"}
    place["strategy"] = strategy
    return {"t": float(number), **place, "size": 1000, "group": 4, **timed, **more}


def test_cells_go_from_small_to_large_and_two_levels_need_two_neighbourhoods() -> None:
    cells, smaller = bench.planned(CommOptions(**OPTIONS), 2**40)
    assert smaller == []
    assert len(cells) == 2 * (2 * len(STRATEGIES) - 1)
    assert [size for *_, size, _ in cells] == sorted(size for *_, size, _ in cells)
    assert [group for _, name, _, group in cells if name == "hierarchical"] == [4, 4]
    assert room_bytes(["mesh"], 10, 8) == 10 * 10 * 8
    few, smaller = bench.planned(CommOptions(**{**OPTIONS, "strategies": "auto,tree,mesh,topk"}), 24 * 2**20)
    large = [cell[1:] for cell in few if cell[2] > 1024]
    assert large[:4] == [(name, 2**20, 2) for name in ("auto", "tree", "mesh")] + [("topk", 2**19, 2)]
    in_turns = [(name, 2**19, 4) for name in ("auto", "tree", "mesh")]  # whose buffers are there at once
    assert large[4:] == [*in_turns, ("topk", 2**18, 4)]
    assert [(cut["strategy"], cut["cut"]) for cut in smaller] == [
        ("topk", "memory: measured with 524288 B"),
        *((name, "memory: measured with 524288 B") for name in ("auto", "tree", "mesh")),
        ("topk", "memory: measured with 262144 B"),
    ]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("groups", "1,2", "--groups: saw '1,2', expected numbers of ranks from 2"),
        ("groups", "two", "--groups: saw 'two'"),
        ("sizes", "1KB", "--sizes: saw '1KB', expected 1KiB to 4GiB"),
        ("sizes", "0MiB", "--sizes"),
        ("strategies", "ring,star", "--strategies: saw 'star', expected all, or some of auto"),
        ("collectives", "sum", "--collectives: saw 'sum', expected all, or some of all-reduce"),
        ("budget_s", 0.0, "--budget-s: saw 0"),
        ("device", "tpu", "--device: saw 'tpu', expected auto, cpu or cuda"),
    ],
)
def test_bad_options(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bench.bench(CommOptions(**{**OPTIONS, key: value}), lambda line: None)


def test_figures_by_hand() -> None:
    """A repeat takes as long as on its slowest rank: 2, 4 and 3 s; 1000 B x 1.5 in 3 s."""
    events = [
        event(0, 1, "ring", [2.0, 1.0, 3.0]),
        event(0, 0, "ring", [1.0, 4.0, 2.0]),
        event(1, 0, "auto", [1.0, 1.0, 1.0]),
        event(2, 0, "topk", None, cut="memory"),
    ]
    found = bench.result(events, "gloo")
    ring, auto = found["cells"]
    assert (ring["avg_s"], ring["min_s"], ring["max_s"], ring["repeats"]) == (3.0, 2.0, 4.0, 3)
    assert ring["std_s"] == pytest.approx((2 / 3) ** 0.5)
    assert ring["busbw_bytes_s"] == pytest.approx(500.0)
    assert ring["sent_bytes"] == 101
    assert auto["strategy"] == "auto"
    cut = {"collective": "all-reduce", "strategy": "topk", "size_bytes": 1000, "group": 4, "cut": "memory"}
    assert found["cuts"] == [cut]
    (pick,) = found["selections"]
    assert (pick["selected"], pick["best"], pick["near"]) == ("auto", "auto", True)
    assert found["selected_within_10_percent"] == 1.0
    lines = report.lines(
        {**found, "device": "cpu", "machine": {"processor": "x", "cores": 2, "memory_gib": 1}}
    )
    assert any("not measured: all-reduce by topk" in line for line in lines)
    assert near_share([]) is None


def cell(strategy: str, size: int, learnt_s: float, judged_s: float) -> dict[str, Any]:
    times = [learnt_s, judged_s] * 4
    place = {"collective": "all-gather", "strategy": strategy, "size_bytes": size, "group": 2}
    return {**place, "times_s": times}


def test_a_pick_far_from_the_best_is_said() -> None:
    """The selector learns from one half of the repeats, and is judged by the other."""
    measured = [cell("ring", 10**6, 1.0, 1.0), cell("mesh", 10**6, 0.9, 2.0), cell("flat", 10**6, 3.0, 3.0)]
    measured += [cell("ring", 10**3, 0.1, 0.1), cell("mesh", 10**3, 0.2, 0.2)]
    picks = selection(measured, "gloo")
    assert [(pick["selected"], pick["best"], pick["near"]) for pick in picks] == [
        ("mesh", "ring", False),
        ("ring", "ring", True),
    ]
    assert picks[0]["over_best"] == 2.0
    assert near_share(picks) == 0.5


def test_what_is_no_line_is_known_where_it_was_measured() -> None:
    model = LinearTime()
    for nbytes, seconds in ((1e6, 1.0), (4e6, 0.2), (16e6, 1.0)):
        for _ in range(3):
            model.observe(nbytes, seconds)
    assert [model.seconds(nbytes) for nbytes in (1e6, 4e6, 16e6)] == pytest.approx([1.0, 0.2, 1.0])
    assert model.seconds(64e6) == model.line(64e6) > 0.2
    assert min(model.alpha, model.beta) >= 0.0
    for step in range(200):
        model.observe(4e6, 0.6, step)
    assert model.seconds(4e6) == pytest.approx(0.6, rel=0.05)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    halves = dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all"), 0.75)
    assert {name: bus_factor(4, name) for name in COLLECTIVES} == {
        **halves,
        "broadcast": 1.0,
        "all-reduce": 1.5,
    }


def test_a_line_is_found_from_noisy_times_of_very_different_sizes() -> None:
    draw, model = random.Random(0), LinearTime()
    for _ in range(200):
        nbytes = draw.choice([1e3, 1e6, 1e9])
        model.observe(nbytes, (1e-4 + 1e-9 * nbytes) * draw.uniform(0.9, 1.1))
    assert model.alpha == pytest.approx(1e-4, rel=0.05)
    assert model.beta == pytest.approx(1e-9, rel=0.05)


def test_a_link_of_half_the_speed_is_learnt_within_200_sums() -> None:
    selector = Selector()
    for step in range(600):
        slow = 2.0 if step >= 400 else 1.0
        for way, alpha, beta in ((RING, 3e-4, 1e-9 * slow), (TREE, 1e-4, 1.5e-9)):
            selector.observe(way, 1e6 * (1 + step % 3), alpha + beta * 1e6 * (1 + step % 3), step)
        if step == 399:
            assert selector.choose([RING, TREE], 3e6, current=TREE) is RING
    assert selector.choose([RING, TREE], 3e6, current=RING) is TREE


def test_a_strategy_is_left_for_one_that_is_clearly_faster_alone() -> None:
    selector = Selector()
    for _ in range(20):
        selector.observe(RING, 1000, 1.0)
        selector.observe(TREE, 1000, 0.95)
    assert selector.choose([RING, TREE], 1000) is TREE
    assert selector.choose([RING, TREE], 1000, current=RING) is RING, "5 % are not worth a change"
    for step in range(200):
        selector.observe(TREE, 1000, 0.85, step)
    assert selector.choose([RING, TREE], 1000, current=RING) is TREE
    unknown = Way("mesh", "data", "gloo")
    assert Selector().choose([unknown, RING], 1000) is unknown
    assert selector.choose([unknown], 1000, current=RING) is RING
