"""``layout.schedule=auto``: schedule and stages per rank are the planner's."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.load import load_job, parse_job
from picotron_ray.config.validation.schedules import PipelineChoice, pipelines
from picotron_ray.errors import ConfigError
from picotron_ray.planner.best_first import BestFirst
from picotron_ray.planner.candidates import candidates
from picotron_ray.planner.cost import step_cost
from picotron_ray.planner.datasheet import GPU
from picotron_ray.planner.recompute_search import cheapest_recompute
from picotron_ray.planner.search import choose_layout
from tests.support.runs.by_hand import job_by_hand


def job(**layout: Any) -> Any:
    return job_by_hand({"layers": 16}, layout={"schedule": "auto", **layout}, precision="bf16")


def test_what_is_looked_at() -> None:
    names = {way.schedule for way in pipelines(job(), 2)}
    assert names == {"1f1b", "interleaved-1f1b", "zbv", "interleaved-zero-bubble"}
    assert PipelineChoice("interleaved-1f1b", 8) in pipelines(job(), 2)
    assert PipelineChoice("interleaved-1f1b", 8) not in pipelines(job(), 4), "of 16 layers"
    assert pipelines(job(), 1) == [PipelineChoice("1f1b", 1)]
    assert {way.virtual_stages for way in pipelines(job(virtual_stages=4), 2)} == {4}
    assert pipelines(job_by_hand(layout={"schedule": "zbv"}), 2) == [PipelineChoice("zbv", 2)]


@pytest.mark.parametrize("kernels", [{"compile": True}, {"norm": "compiled"}])
def test_a_backward_pass_that_cannot_be_split_is_left_whole(kernels: dict[str, Any]) -> None:
    config = job_by_hand({"layers": 16}, layout={"schedule": "auto"}, kernels=kernels)
    assert {way.schedule for way in pipelines(config, 2)} == {"1f1b", "interleaved-1f1b"}


@pytest.mark.parametrize("budget", [1e12, 4e5, 2.5e5])
@pytest.mark.parametrize("workers", [4, 6])
def test_the_search_finds_what_trying_all_finds(workers: int, budget: float) -> None:
    config = job()
    tried = []
    for candidate in candidates(config, workers):
        layout = cheapest_recompute(config, candidate, budget, GPU, (2, 2))
        if layout is not None:
            tried.append((step_cost(config, layout, GPU, (2, 2)).total_s, layout))
    search = BestFirst(config, GPU, (2, 2), budget)
    search.run(workers)
    assert bool(tried) == bool(search.found)
    if tried:
        assert search.found[0][0] == min(tried)[0]
    assert len({one.schedule for _, one in tried}) > 1 or not tried


def test_more_stages_shorten_the_bubble() -> None:
    """Eight stages on eight micro-batches: a rank's layers in four pieces wait a quarter as long."""
    config = load_job("llama-3-8b", ["data.path=unread", "layout.pp=8", "layout.tp=1", "layout.schedule=auto",
                                     "data.global_batch=8", "layout.dp=1", "layout.zero=0"])  # fmt: skip
    found = choose_layout(config, 8, GPU, (8,)).layout
    plain = choose_layout(load_job("llama-3-8b", ["data.path=unread", "layout.pp=8", "layout.tp=1",
                                                  "data.global_batch=8", "layout.dp=1", "layout.zero=0"]),
                          8, GPU, (8,)).layout  # fmt: skip
    assert plain.schedule == "1f1b"
    assert found.schedule != "1f1b"
    waits = [step_cost(config, layout, GPU, (8,)) for layout in (found, plain)]
    assert waits[0].total_s < waits[1].total_s
    assert waits[0].bubble_s < waits[1].bubble_s


def test_auto_is_a_config_like_any_other() -> None:
    assert parse_job({"layout": {"schedule": "auto"}}).layout.schedule == "auto"
    with pytest.raises(ConfigError, match=r"layout.virtual_stages: saw 4 with layout.pp=1"):
        parse_job({"layout": {"schedule": "auto", "virtual_stages": 4, "pp": 1}})
    with pytest.raises(ConfigError, match="drop them"):
        parse_job({"layout": {"schedule": "auto", "actions": ["0F0 0B0"]}})
