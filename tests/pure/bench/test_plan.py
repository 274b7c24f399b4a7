"""``bench plan``: what is drawn, and what measured rows say of the planner, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.bench.plan import bench, report
from picotron_ray.bench.plan.bench import PlanOptions, draw, judged
from picotron_ray.config.load import load_job
from picotron_ray.errors import ConfigError
from picotron_ray.planner.hardware import hardware
from tests.pure.planner.test_hardware_profile import profile


def options(path: Path, **changes: Any) -> PlanOptions:
    return PlanOptions(**{"hardware": str(path), "workers": 2, "layouts": 12, "rounds": 5, "steps": 3,
                          "warmup": 1, "seed": 0, **changes})  # fmt: skip


@pytest.fixture
def here(tmp_path: Path) -> Path:
    path = tmp_path / "here.json"
    path.write_text(json.dumps(profile()))
    return path


def row(name: str, predicted_s: float, measured_s: float) -> dict[str, Any]:
    return {
        "layout": name, "predicted_s": predicted_s, "measured_s": measured_s, "low_s": 0.9 * measured_s,
        "high_s": 1.2 * measured_s, "ratio": measured_s / predicted_s,
    }  # fmt: skip


def test_the_same_seed_draws_the_same_layouts(here: Path) -> None:
    job, found = load_job("tiny", ["cluster.max_workers=2"]), hardware(str(here), "fp32")
    drawn = draw(job, found, options(here))
    assert drawn == draw(job, found, options(here))
    assert drawn != draw(job, found, options(here, seed=1))
    assert drawn[0] == draw(job, found, options(here, seed=1))[0], "the planner's choice is always among them"
    assert len({layout for layout, _ in drawn}) == 12
    assert all(layout.world_size == 2 for layout, _ in drawn)
    assert min(seconds for _, seconds in drawn) == drawn[0][1]


def test_more_layouts_than_there_are_is_refused(here: Path) -> None:
    job = load_job("tiny", ["layout.dp=2", "layout.micro_batch=1", "cluster.max_workers=2"])
    with pytest.raises(ConfigError, match=r"--layouts: saw 12, expected at most \d"):
        draw(job, hardware(str(here), "fp32"), options(here))


def test_a_gpus_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(profile(device="cuda")))
    with pytest.raises(
        ConfigError, match=r"which is of GPUs, expected a file of .*: layouts are measured on"
    ):
        bench.bench("tiny", ["precision=fp32"], options(path), lambda line: None)


def test_what_rows_say_of_the_planner() -> None:
    """The planner's choice is second of four: 10 % slower than the fastest, inside its upper quartile."""
    found = judged([row("a", 1.0, 2.2), row("b", 1.1, 2.0), row("c", 1.2, 3.0), row("d", 1.3, 4.0)])
    assert [one["layout"] for one in found["rows"]] == ["b", "a", "c", "d"]
    assert found["rank_correlation"] == pytest.approx(0.8)
    assert (found["chosen"], found["fastest"]) == ("a", "b")
    assert found["chosen_within"] == pytest.approx(0.1)
    assert found["chosen_in_quartiles"]
    assert report.lines(found)[-1] == "the planner takes a: +10.0 % of the fastest, b, inside its quartiles"
    assert report.lines(found)[0].endswith("predicted   1.1000 s (1.82)  b")
