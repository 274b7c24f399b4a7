"""Ray Train's ``ScalingConfig`` and ``RunConfig``, written into a job's config: applied or refused.

| Ray Train | here |
|---|---|
| ``num_workers`` n or (min, max) | ``cluster.min_workers``, ``cluster.max_workers`` |
| ``use_gpu`` | ``cluster.device``: ``cuda``; False turns ``auto`` into ``cpu`` |
| ``resources_per_worker["CPU"]`` | ``cluster.cpus_per_worker`` (one GPU per worker, nothing else) |
| ``name``, ``storage_path`` | ``name``, ``storage.url`` |
| ``checkpoint_config.num_to_keep`` | ``checkpoint.keep_last`` |
| ``failure_config.max_failures`` | ``elastic.max_failures``; -1: no limit on their sum |
| ``callbacks`` | called by ``ElasticTrainer`` |

A field at its default leaves the job's own value: Ray's classes fill defaults in when they are made, so a
default that was written out cannot be told from one that was not. Every other field that differs from its
default is refused, also one that a later Ray adds.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from ray.train.constants import DEFAULT_STORAGE_PATH
from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from picotron_ray.config.load import parse_job, read_source
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError

Job = JobConfig | Mapping[str, Any] | str | os.PathLike[str]
UNNAMED = "ray_train_run-"
"""What Ray puts before the date where a RunConfig was given no name."""
NO_LIMIT = 2**63 - 1
_APPLIED = {
    "ScalingConfig": {"num_workers", "use_gpu", "resources_per_worker"},
    "RunConfig": {"name", "storage_path", "checkpoint_config", "failure_config", "callbacks"},
    "CheckpointConfig": {"num_to_keep"},
    "FailureConfig": {"max_failures"},
}
_HINTS = {
    "placement_strategy": "workers go to whichever nodes have room",
    "elastic_resize_monitor_interval_s": "a run grows as soon as workers are ready (elastic.grow)",
    "storage_filesystem": "name the storage by its URL: storage_path, with storage.endpoint_url in the job",
    "worker_runtime_env": "give it to ray.init or `ray job submit --runtime-env`",
    "checkpoint_score_attribute": "the newest commits are kept; see checkpoint.keep_every_steps",
}


def job_of(job: Job, scaling: ScalingConfig | None, run: RunConfig | None) -> JobConfig:
    """The job with what Ray's configs ask for.

    Args:
        job: a config, plain data as YAML gives it, or a YAML file or packaged recipe.

    Raises:
        ConfigError: one line per mistake, Ray's fields by ``Class.field``.
    """
    raw = _raw(job)
    problems = [*_scaling(raw, scaling), *_run(raw, run)]
    if problems:
        raise ConfigError(*problems)
    return parse_job(raw)


def _raw(job: Job) -> dict[str, Any]:
    if isinstance(job, JobConfig):
        return job.model_dump(mode="json")
    if isinstance(job, Mapping):
        return copy.deepcopy(dict(job))
    if isinstance(job, str | os.PathLike):
        return read_source(os.fspath(job))
    raise ConfigError(
        f"job: saw {_class(job)}, expected a JobConfig, a mapping, or the path of a YAML file or recipe"
    )


def _scaling(raw: dict[str, Any], scaling: ScalingConfig | None) -> Iterator[str]:
    if scaling is None:
        return
    if not isinstance(scaling, ScalingConfig):
        yield _wrong_class("scaling_config", scaling, "ScalingConfig")
        return
    yield from _refused(ScalingConfig, scaling)
    if scaling.min_workers < 1:
        yield f"ScalingConfig.num_workers: saw {scaling.num_workers!r}, expected at least 1 worker"
    _put(raw, "cluster", "min_workers", scaling.min_workers)
    _put(raw, "cluster", "max_workers", scaling.max_workers)
    yield from _device(raw, scaling)
    if scaling.resources_per_worker is not None:
        _put(raw, "cluster", "cpus_per_worker", float(scaling.num_cpus_per_worker))
        others = {key: value for key, value in scaling.additional_resources_per_worker.items() if value}
        if others:
            yield (
                f"ScalingConfig.resources_per_worker: saw {others}, which ElasticTrainer does not apply;"
                " expected CPU and GPU alone"
            )


def _device(raw: dict[str, Any], scaling: ScalingConfig) -> Iterator[str]:
    section = raw.get("cluster")
    asked = section.get("device", "auto") if isinstance(section, dict) else "auto"
    if scaling.use_gpu:
        _put(raw, "cluster", "device", "cuda")
        if scaling.num_gpus_per_worker != 1:
            yield (
                f"ScalingConfig.resources_per_worker: saw {scaling.num_gpus_per_worker:g} GPU, expected 1:"
                " a worker owns one GPU; raise num_workers instead"
            )
    elif asked == "cuda":
        yield (
            "ScalingConfig.use_gpu: saw False, but the job has cluster.device=cuda; set use_gpu=True, or"
            " change the job"
        )
    elif asked == "auto":
        _put(raw, "cluster", "device", "cpu")


def _run(raw: dict[str, Any], run: RunConfig | None) -> Iterator[str]:
    if run is None:
        return
    if not isinstance(run, RunConfig):
        yield _wrong_class("run_config", run, "RunConfig")
        return
    yield from _refused(RunConfig, run)
    yield from _refused(CheckpointConfig, run.checkpoint_config)
    yield from _refused(FailureConfig, run.failure_config)
    for callback in run.callbacks or ():
        if not isinstance(callback, UserCallback):
            yield (
                f"RunConfig.callbacks: saw {_class(callback)}, expected ray.train.UserCallback: others hook"
                " into Ray Train's own controller"
            )
    assert run.name is not None  # Ray fills these in
    assert run.checkpoint_config is not None
    assert run.failure_config is not None
    if not run.name.startswith(UNNAMED):
        _put(raw, "", "name", run.name)
    if run.storage_path != DEFAULT_STORAGE_PATH:
        _put(raw, "storage", "url", run.storage_path)
    if run.checkpoint_config.num_to_keep is not None:
        _put(raw, "checkpoint", "keep_last", run.checkpoint_config.num_to_keep)
    if run.failure_config.max_failures:
        failures = run.failure_config.max_failures
        _put(raw, "elastic", "max_failures", NO_LIMIT if failures == -1 else failures)


def _refused(kind: type[Any], config: Any) -> Iterator[str]:
    """A line for every field that is not applied and differs from what Ray fills in by itself."""
    untouched = kind()
    for field in fields(kind):
        value = getattr(config, field.name)
        if field.name in _APPLIED[kind.__name__] or value == getattr(untouched, field.name):
            continue
        hint = _HINTS.get(field.name, "leave it out")
        yield f"{kind.__name__}.{field.name}: saw {value!r}, which ElasticTrainer does not apply; {hint}"


def _put(raw: dict[str, Any], section: str, key: str, value: Any) -> None:
    """Set a key of a section; a section that is none is left for the parser to complain about."""
    into = raw.setdefault(section, {}) if section else raw
    if isinstance(into, dict):
        into[key] = value


def _class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _wrong_class(argument: str, value: Any, expected: str) -> str:
    return (
        f"{argument}: saw {_class(value)}, expected ray.train.{expected} of Ray Train V2 (not Ray Tune's, and"
        " without RAY_TRAIN_V2_ENABLED=0)"
    )
