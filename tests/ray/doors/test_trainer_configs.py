"""Ray Train's configs: what is applied, and that nothing else passes unseen. No cluster is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
from ray.train.v2.api.callback import RayTrainCallback, UserCallback
from ray.train.v2.api.config import (
    CheckpointConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
)

from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.ray_train.configs import NO_LIMIT, job_of


def test_every_applied_field_lands_in_the_job(tmp_path: Path) -> None:
    scaling = ScalingConfig(num_workers=(2, 3), use_gpu=True, resources_per_worker={"CPU": 2, "GPU": 1})
    run = RunConfig(
        name="mine",
        storage_path=str(tmp_path),
        checkpoint_config=CheckpointConfig(num_to_keep=7),
        failure_config=FailureConfig(max_failures=5),
        callbacks=[UserCallback()],
    )
    job = job_of("tiny", scaling, run)
    assert (job.cluster.min_workers, job.cluster.max_workers) == (2, 3)
    assert (job.cluster.device, job.cluster.cpus_per_worker) == ("cuda", 2.0)
    assert (job.name, job.storage.url) == ("mine", str(tmp_path))
    assert (job.checkpoint.keep_last, job.elastic.max_failures) == (7, 5)
    endless = job_of("tiny", None, RunConfig(failure_config=FailureConfig(max_failures=-1)))
    assert endless.elastic.max_failures == NO_LIMIT


def test_defaults_of_ray_leave_the_job_as_it_is() -> None:
    assert job_of("tiny", None, None) == load_job("tiny")
    kept = load_job("tiny", ["cluster.device=cpu", "cluster.max_workers=1"])
    assert job_of(kept, ScalingConfig(), RunConfig()) == kept
    assert job_of({"name": "plain"}, None, None) == JobConfig(name="plain")
    assert job_of("tiny", ScalingConfig(num_workers=2), None).cluster.min_workers == 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"scaling_config": ScalingConfig(num_workers=0)}, "ScalingConfig.num_workers"),
    ({"scaling_config": ScalingConfig(placement_strategy="SPREAD")}, "ScalingConfig.placement_strategy"),
    ({"scaling_config": ScalingConfig(accelerator_type="H100")}, "ScalingConfig.accelerator_type"),
    ({"scaling_config": ScalingConfig(label_selector={"a": "b"})}, "ScalingConfig.label_selector"),
    ({"scaling_config": ScalingConfig(use_tpu=True)}, "ScalingConfig.use_tpu"),
    (
        {"scaling_config": ScalingConfig(elastic_resize_monitor_interval_s=5.0)},
        "ScalingConfig.elastic_resize_monitor_interval_s",
    ),
    (
        {"scaling_config": ScalingConfig(resources_per_worker={"CPU": 1, "memory": 1e9})},
        "ScalingConfig.resources_per_worker",
    ),
    (
        {"scaling_config": ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 2})},
        "ScalingConfig.resources_per_worker",
    ),
    ({"run_config": RunConfig(storage_filesystem=pyarrow.fs.LocalFileSystem())}, "storage_filesystem"),
    ({"run_config": RunConfig(worker_runtime_env={"env_vars": {"A": "1"}})}, "worker_runtime_env"),
    ({"run_config": RunConfig(logging_config=LoggingConfig(log_level="DEBUG"))}, "logging_config"),
    (
        {"run_config": RunConfig(checkpoint_config=CheckpointConfig(checkpoint_score_attribute="loss"))},
        "CheckpointConfig.checkpoint_score_attribute",
    ),
    (
        {"run_config": RunConfig(failure_config=FailureConfig(controller_failure_limit=3))},
        "FailureConfig.controller_failure_limit",
    ),
    (
        {"run_config": RunConfig(failure_config=FailureConfig(preemption_grace_s=1.0))},
        "FailureConfig.preemption_grace_s",
    ),
    ({"run_config": RunConfig(callbacks=[RayTrainCallback()])}, "RunConfig.callbacks"),  # type: ignore[list-item]
    ({"run_config": RunConfig(name="Not A Name")}, "name:"),
    ({"run_config": object()}, "run_config: saw builtins.object"),
    ({"scaling_config": object()}, "scaling_config: saw builtins.object"),
    ({"job": 5}, "job: saw builtins.int"),
    ({"job": {"nmae": "x"}}, "nmae"),
]


@pytest.mark.parametrize(("arguments", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_is_not_applied_is_refused_in_one_line(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job_of(arguments.get("job", "tiny"), arguments.get("scaling_config"), arguments.get("run_config"))
    assert len(caught.value.problems) == 1, caught.value.problems
    assert named in caught.value.problems[0]


def test_use_gpu_false_does_not_silently_overrule_the_job() -> None:
    assert job_of("tiny", ScalingConfig(), None).cluster.device == "cpu"  # the recipe says auto
    with pytest.raises(ConfigError, match="use_gpu: saw False"):
        job_of({"cluster": {"device": "cuda"}}, ScalingConfig(), None)
