"""Choice of a precision for ``precision: auto``, once, before any worker computes; nodes that have one.

What a run was started with stands in its run.json, and every later launch means that. The first launch looks
at the GPUs of all living nodes, through a task on each of them (NVML, no torch).
"""

from __future__ import annotations

from typing import Any

import ray

from picotron_ray.checkpoint.storage.base import Storage, get_json
from picotron_ray.config.schema.compute import Precision
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import LEAST_CAPABILITY, Capability, chosen, precision_problem
from picotron_ray.errors import ConfigError, NotFoundError
from picotron_ray.runtime.ray_cluster.placement import NodeView, living_nodes, on_node, worker_needs

LOOK_S = 60.0
"""Longest wait for a node to say what GPUs it has; a task on it starts a process."""


def choose_precision(job: JobConfig, storage: Storage) -> tuple[Precision, str]:
    """The precision that ``auto`` comes to, and why.

    Raises:
        ConfigError: no GPU is there to look at.
    """
    try:
        saved = get_json(storage, "run.json")["config"]
    except NotFoundError:
        return _by_devices(job)
    return saved.get("precision", JobConfig().precision), f"as run {job.name} was started"


def _by_devices(job: JobConfig) -> tuple[Precision, str]:
    nodes = living_nodes()
    needs = worker_needs(job.cluster, nodes)
    if not needs.gpus:
        return chosen("cpu", ())
    offering = [node for node in nodes if node.gpus]
    if not offering:
        raise ConfigError(
            "precision: saw auto, but no node with a GPU is there yet to tell it from; name one, such as bf16"
        )
    found = capabilities(offering)
    silent = [node.host for node in offering if not found[node.id]]
    if silent:
        raise ConfigError(
            f"precision: saw auto, but NVML tells nothing of the GPUs on {', '.join(silent)}; name one"
        )
    return chosen("cuda", (each for several in found.values() for each in several))


def able_nodes(job: JobConfig, nodes: list[NodeView], device: str) -> tuple[list[NodeView], str]:
    """The nodes whose devices have the job's precision, and why the first of the others does not."""
    if device != "cuda" or job.precision not in LEAST_CAPABILITY:
        problem = precision_problem(job, device)
        return ([], problem) if problem else (nodes, "")
    found = capabilities([node for node in nodes if node.gpus])
    problems = {node.id: precision_problem(job, device, found.get(node.id, ())) for node in nodes}
    able = [node for node in nodes if not problems[node.id]]
    return able, next((problem for problem in problems.values() if problem), "")


def capabilities(nodes: list[NodeView]) -> dict[str, list[Capability]]:
    """Compute capability of every GPU that each node's driver shows, by node; empty where it shows none."""
    look: Any = ray.remote(_look).options(num_cpus=0, max_retries=0)
    asked = {node.id: look.options(scheduling_strategy=on_node(node.id)).remote() for node in nodes}
    return {node: ray.get(answer, timeout=LOOK_S) for node, answer in asked.items()}


def _look() -> list[Capability]:
    from picotron_ray.observability.nvml import Gpus

    return Gpus().capabilities()
