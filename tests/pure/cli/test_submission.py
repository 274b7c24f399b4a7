"""A driver inside a Ray job: whose job it is, and which paths would be lost with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import submission
from picotron_ray.runtime.driver.resolve_job import PATHS, ResolvedJob, resolve
from picotron_ray.runtime.driver.submission import Submission

JOB = Submission("raysubmit_1", {"team": "a"}, uploaded=True)
BARE = Submission("raysubmit_2", {}, uploaded=False)


def environment(**runtime_env: object) -> dict[str, str]:
    """The environment that Ray's job supervisor gives its driver."""
    metadata = {"job_submission_id": "raysubmit_1", "job_name": "raysubmit_1", "team": "a"}
    return {submission.JOB_CONFIG: json.dumps({"runtime_env": runtime_env, "metadata": metadata})}


def test_the_job_is_read_from_what_ray_hands_the_driver() -> None:
    assert submission.current(environment(working_dir="gcs://_ray_pkg_0.zip")) == JOB
    assert str(JOB) == "Ray job raysubmit_1 (team=a)"
    found = submission.current(environment())
    assert found is not None
    assert not found.uploaded
    assert submission.current({}) is None
    assert submission.current({submission.JOB_CONFIG: '{"runtime_env": {}, "metadata": {}}'}) is None


def test_ray_still_uses_that_variable() -> None:
    source = (Path(_ray_folder()) / "_private" / "runtime_env" / "constants.py").read_text()
    assert f'RAY_JOB_CONFIG_JSON_ENV_VAR = "{submission.JOB_CONFIG}"' in source


def _ray_folder() -> str:
    import importlib.util

    spec = importlib.util.find_spec("ray")  # without importing it: this is the pure tier
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent)


def with_user_paths(job: JobConfig, submission: Submission | None) -> JobConfig:
    return resolve(ResolvedJob(job, submission), (PATHS,)).job


def test_outside_a_job_paths_are_relative_to_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    values = {"data": {"source": "text", "path": "corpus"}, "init_from": {"run": "a", "url": "old"}}
    found = with_user_paths(JobConfig.model_validate(values), None)
    assert found.storage.url == str(tmp_path / "runs")
    assert found.data.path == str(tmp_path / "corpus")
    assert found.init_from.url == str(tmp_path / "old")
    assert found.snapshot.folder == "/dev/shm"
    s3 = JobConfig.model_validate({"storage": {"url": "s3://bucket/x"}})
    assert with_user_paths(s3, None).storage.url == "s3://bucket/x"


@pytest.mark.parametrize(
    ("url", "job", "why"),
    [
        ("./runs", JOB, "working_dir, which Ray deletes"),
        ("runs", BARE, "a folder of one node"),
        ("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_0/runs", JOB, "which Ray deletes"),
    ],
)
def test_storage_that_would_be_lost_with_the_job_is_refused(url: str, job: Submission, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        with_user_paths(JobConfig.model_validate({"storage": {"url": url}}), job)
    assert len(refused.value.problems) == 1
    assert str(refused.value).startswith(f"storage.url: saw '{url}' in Ray job {job.id}")


def test_relative_data_stays_relative_to_the_uploaded_folder() -> None:
    values = {"data": {"source": "text", "path": "corpus"}, "storage": {"url": "/shared/runs"}}
    job = JobConfig.model_validate(values)
    assert with_user_paths(job, JOB).data.path == "corpus"
    assert with_user_paths(job, BARE).data.path == str(Path("corpus").absolute())
    with pytest.raises(ConfigError, match=r"init_from\.url"):
        with_user_paths(JobConfig.model_validate({**values, "init_from": {"run": "a", "url": "old"}}), JOB)
