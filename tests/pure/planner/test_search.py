"""Candidates of the search by hand, and the lines that say what was found or why nothing was."""

from __future__ import annotations

import re
from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import LayoutError
from picotron_ray.planner import candidates
from picotron_ray.planner.device_profile import CPU
from picotron_ray.planner.search import choose_layout


def job(global_batch: int = 16, **layout: Any) -> JobConfig:
    cluster = {"max_workers": 64}
    return parse_job({"data": {"global_batch": global_batch}, "layout": layout, "cluster": cluster})


@pytest.mark.parametrize(
    ("batch", "dp", "pp", "sizes"),
    [
        (16, 1, 1, [1, 2, 3, 4, 6, 8, 16]),
        (16, 3, 1, [1, 2, 3, 6]),  # six rows at most
        (16, 16, 1, [1]),
        (40, 1, 5, [1, 2, 3, 4, 5, 7, 8, 10, 14, 20, 40]),
        # 7, 14, 21, 28, 42 and 56 of 1000 rows, powers of two and three times these
        (1000, 1, 7, sorted([143, 72, 48, 36, 24, 18,
                             1, 2, 4, 8, 16, 32, 63, 125, 250, 500, 1000,
                             3, 6, 11, 21, 42, 84, 167, 334])),
    ],
)  # fmt: skip
def test_micro_batches(batch: int, dp: int, pp: int, sizes: list[int]) -> None:
    assert candidates.micro_batches(job(batch), dp, pp) == sizes


def test_a_micro_batch_that_is_asked_for_is_the_only_one() -> None:
    assert candidates.micro_batches(job(micro_batch=5), 1, 1) == [5]


@pytest.mark.parametrize(
    ("zero", "replicate", "replicas", "expected"),
    [
        ("auto", "auto", 1, [(0, 1)]),
        ("auto", "auto", 2, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        ("auto", "auto", 6, [(0, 1), *((zero, copies) for zero in (1, 2, 3) for copies in (1, 2, 3))]),
        (2, "auto", 4, [(2, 1), (2, 2)]),
        (0, "auto", 4, [(0, 1)]),
        (1, "auto", 1, [(1, 1)]),
        ("auto", 1, 4, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        ("auto", 2, 4, [(1, 2), (2, 2), (3, 2)]),
        (3, 2, 4, [(3, 2)]),
    ],
)
def test_shardings(
    zero: int | str, replicate: int | str, replicas: int, expected: list[tuple[int, int]]
) -> None:
    config = job()
    asked = config.layout.model_copy(update={"zero": zero, "replicate": replicate})
    assert candidates._shardings(config.model_copy(update={"layout": asked}), replicas) == expected


def test_expert_degrees() -> None:
    mixture = parse_job(
        {"model": {"moe": {"experts": 12, "intermediate_size": 16}}, "layout": {"ep": "auto"}}
    )
    assert candidates.expert_degrees(mixture, 8) == [1, 2, 4]
    assert candidates.expert_degrees(mixture, 5) == [1]
    assert candidates.expert_degrees(job(ep="auto"), 8) == [1]
    named = mixture.layout.model_copy(update={"ep": 3})
    assert candidates.expert_degrees(mixture.model_copy(update={"layout": named}), 8) == [3]


def test_the_reason_counts_candidates_and_idle_workers() -> None:
    """dp 2 and 4 with one micro-batch each, and 3, whose shares are uneven; 1 cannot win any more."""
    config = job(tp=1, pp=1, zero=0, micro_batch=4)
    for workers, idle in ((4, ""), (5, " (1 idle)"), (6, " (2 idle)")):
        choice = choose_layout(job(dp=4, tp=1, pp=1, zero=0, micro_batch=4), workers)
        start = (
            f"{choice.layout}: {CPU.said(choice.cost_s)} s a step by guess, least of 1 on {workers} workers"
        )
        assert choice.reason == f"{start}{idle}; routes dp=4 inside a node at 1 GB/s"
    assert "least of 3 on 4 workers" in choose_layout(config, 4).reason


@pytest.mark.parametrize(
    ("layout", "workers", "line"),
    [
        ({"dp": 2}, 0, "layout: saw no worker, expected at least 1; wait for one to join"),
        (
            {"dp": 2, "tp": 2},
            3,
            "layout: saw 3 workers, expected at least 4 for dp=2 tp=2",
        ),
        (
            {"dp": 2, "cp": 2},
            1,
            "layout: saw 1 workers, expected at least 4 for dp=2 cp=2",
        ),
    ],
)
def test_why_no_layout_was_found(layout: dict[str, Any], workers: int, line: str) -> None:
    more = "; raise cluster.max_workers, add nodes, or set those degrees to auto" if workers else ""
    with pytest.raises(LayoutError, match=f"^{re.escape(line + more)}$"):
        choose_layout(job(**layout), workers)
