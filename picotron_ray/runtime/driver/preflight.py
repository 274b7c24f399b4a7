"""From a config to a coordinator that works on it: checks first, then attach or start.

Everything that can be refused is refused here, before an actor exists: data, storage, room for snapshot
slots, a run of that name with another model.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from picotron_ray.checkpoint.snapshot.slot_pool import choose_folder
from picotron_ray.checkpoint.storage.base import Storage, probe
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.resume import check_resume
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.devices import device_problems, offload_problems
from picotron_ray.config.support.extras import needed_extras
from picotron_ray.config.support.kernels import attention_problem, overlap_problem
from picotron_ray.data.dataset import build_dataset
from picotron_ray.errors import ConfigError, NotFoundError, SlotError
from picotron_ray.observability.ports import check_ports
from picotron_ray.observability.trackers import check_trackers
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.search import choose_layout
from picotron_ray.runtime.driver.custom_model import with_built_model
from picotron_ray.runtime.driver.resolve_precision import able_nodes, settle_precision
from picotron_ray.runtime.driver.submission import Submission
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, cache_folder, coordinator_name
from picotron_ray.runtime.ray_cluster.placement import ON_HEAD, living_nodes, worker_needs
from picotron_ray.runtime.run_storage import init_from


def find_coordinator(run: str) -> ActorHandle | None:
    """The coordinator of a run on the connected Ray cluster, if it lives."""
    try:
        return ray.get_actor(coordinator_name(run), NAMESPACE)
    except ValueError:
        return None


def event_folder(run: str) -> Path:
    """Where a run's coordinator keeps the event logs that replay."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "picotron_ray" / run / "events"


def check(job: JobConfig) -> list[str]:
    """All checks that need no cluster; returns warnings.

    Raises ConfigError (exit 2) or StorageError (exit 4), one line per problem, having changed nothing but
    the token cache.
    """
    splits = build_dataset(job.data, job.model.vocab_size, job.seed, cache_folder())
    del splits
    layout = choose_layout(job, job.cluster.max_workers).layout
    need = _slot_bytes(job, layout.world_size)
    try:
        _, note = choose_folder(job.snapshot.folder, job.snapshot.overflow_folder, need)
    except SlotError as error:
        raise ConfigError(f"snapshot.folder: {error}") from error
    check_ports(job.metrics, local=not os.environ.get("RAY_ADDRESS"))
    check_trackers(job.trackers)
    storage = open_storage(job.storage, job.name)
    probe(storage)
    job, _ = init_from.settle(job, storage, verify=True)
    fed = init_from.imported_note(job, storage)
    check_resume_step(job, storage)
    return [line for line in (note, fed, *check_same_run(job, storage)) if line]


def _slot_bytes(job: JobConfig, workers: int) -> int:
    """Room for all slots on one machine, each large enough for whatever its worker may hold."""
    estimate = memory_estimate(job, choose_layout(job, workers).layout)
    return int(estimate.state_bytes + estimate.host_state_bytes) * job.snapshot.slots * workers


def check_resume_step(job: JobConfig, storage: Storage) -> None:
    """Whether the step to resume from was committed; raises ConfigError naming those that were."""
    wanted = job.checkpoint.resume_step
    if wanted is None:
        return
    log = RunLog(storage)
    log.refresh()
    steps = sorted({int(entry.body["step"]) for entry in log.commits()})
    if wanted not in steps:
        raise ConfigError(
            f"checkpoint.resume_step: saw {wanted}, expected a committed step of run {job.name!r}: {steps};"
            " leave it out to resume from the newest"
        )


def check_same_run(job: JobConfig, storage: Storage) -> list[str]:
    """Compare with the run of that name in storage: one line per changed key; ConfigError where refused."""
    try:
        saved: dict[str, Any] = json.loads(storage.get("run.json"))["config"]
    except NotFoundError:
        return []
    return check_resume(saved, job)


def check_cluster(job: JobConfig) -> None:
    """Whether the connected cluster can host ``min_workers``, with the kernels and precision asked for.

    Raises ConfigError where not.
    """
    nodes = living_nodes()
    needs = worker_needs(job.cluster, nodes)
    cp = 1 if job.layout.cp == "auto" else job.layout.cp
    device = "cuda" if needs.gpus else "cpu"
    able, unable = able_nodes(job, nodes, device)
    total = sum(node.capacity(needs) for node in able)
    short = total < job.cluster.min_workers
    waits = job.cluster.autoscale and device == "cuda"  # nodes that have it may come
    missing = _missing_extras(job)
    found = {
        "precision": (unable if short and not waits else "") or missing.get("precision", ""),
        "optimizer.moments": missing.get("optimizer.moments", ""),
        "kernels.attention": attention_problem(job, device, cp) or missing.get("kernels.attention"),
        "kernels.tp_overlap": overlap_problem(job, device),
        **offload_problems(job, device),
        **device_problems(job, device),
    }
    problems = [f"{key}: {problem}" for key, problem in found.items() if problem]
    if problems:
        raise ConfigError(*problems)
    if short and not job.cluster.autoscale:
        what = f"{needs.gpus:g} GPU and {needs.cpus:g} CPU" if needs.gpus else f"{needs.cpus:g} CPU"
        raise ConfigError(
            f"cluster.min_workers: the cluster has room for {total} workers of {what} each, expected at least"
            f" {job.cluster.min_workers}; add nodes, lower it, or let Ray add nodes (cluster.autoscale)"
        )


def _missing_extras(job: JobConfig) -> dict[str, str]:
    """By key, what the job needs and this environment, which workers share, has not."""
    return {extra.key: extra.missing for extra in needed_extras(job) if find_spec(extra.module) is None}


def ensure_coordinator(
    job: JobConfig,
    owns_ray: bool = False,
    submission: Submission | None = None,
    tied_to: dict[str, Any] | None = None,
) -> tuple[ActorHandle, bool]:
    """Attach to the run's coordinator, or start one; returns (handle, attached).

    Two calls at once end with one coordinator: Ray keeps names unique. It runs on the head,
    wherever the driver is: there it outlives the nodes that come and go.

    Args:
        owns_ray: the connected Ray was started for this run alone and goes down with it.
        submission: the Ray job that starts the run.
        tied_to: the process (``runtime.owner``) with which a new run ends; None: it outlives all drivers.
    """
    found = find_coordinator(job.name)
    if found is not None:
        return found, True
    job = with_built_model(job)
    storage = open_storage(job.storage, job.name)
    job, note = settle_precision(job, storage)
    check_cluster(job)
    from picotron_ray.runtime.coordinator.actor import Coordinator

    job, record = init_from.settle(job, storage)
    options = {
        "name": coordinator_name(job.name),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 32,
        "resources": ON_HEAD,
        "scheduling_strategy": "DEFAULT",  # not in the placement group of a Tune trial that asks for it
    }
    if owns_ray and job.metrics.host is None:
        job = job.model_copy(update={"metrics": job.metrics.model_copy(update={"host": "127.0.0.1"})})
    actor: Any = ray.remote(Coordinator).options(**options)
    settings = {
        "event_folder": str(event_folder(job.name)),
        "owns_ray": owns_ray,
        "origin": record,
        "submission": submission.plain() if submission else None,
        "tied_to": tied_to,
        "notes": [note] if note else [],
    }
    return actor.remote(job.model_dump(mode="json"), settings), False
