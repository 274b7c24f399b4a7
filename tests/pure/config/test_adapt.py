"""What a run may change of itself: contradictions are refused, settings hold only what may be set."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.settings import changed, with_settings
from picotron_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"adapt": {"apply": ["rows"]}, "telemetry": {"interval_s": None}}, "nothing is measured"),
        ({"adapt": {"apply": ["rows", "rows"]}}, "name each kind once"),
        ({"adapt": {"apply": ["compression"]}, "precision": "fp64"}, "exact sums"),
        ({"adapt": {"apply": ["precision"]}, "precision": "bf16"}, "only fp32 and tf32"),
        (
            {"adapt": {"apply": ["row"]}},
            "compression, did you mean rows?",
        ),
        ({"adapt": {"hysteresis": 1.0}}, "adapt.hysteresis"),
        ({"adapt": {"budget": 0}}, "adapt.budget"),
    ],
)
def test_contradictions_are_refused_in_one_line(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_job(tree)
    (line,) = caught.value.problems
    assert said in line


def test_settings_hold_instead_of_the_jobs_keys() -> None:
    job = with_settings(JobConfig(), (("comm.bucket_mib", "5.0"), ("layout.pp", "2")))
    assert (job.comm.bucket_mib, job.layout.pp, job.steps) == (5.0, 2, JobConfig().steps)


@pytest.mark.parametrize("settings", [(("data.global_batch", "1"),), (("seed", "1"),), (("layout.pp", "x"),)])
def test_the_batch_and_the_samples_cannot_be_set(settings: Any) -> None:
    with pytest.raises(ValueError, match=r"settings: saw|layout"):
        with_settings(JobConfig(), settings)


def test_what_the_job_says_anyway_is_no_setting() -> None:
    job = JobConfig.model_validate({"layout": {"micro_batch": 4}})
    assert changed(job, {"layout.micro_batch": "auto"}, {"layout.micro_batch": "4"}) == ()
    assert changed(job, {"layout.micro_batch": "4"}, {"layout.micro_batch": "auto"}) == (
        ("layout.micro_batch", "auto"),
    )
