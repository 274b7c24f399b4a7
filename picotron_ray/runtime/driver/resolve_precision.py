"""Choice of a precision for ``precision: auto``, once, before any worker computes; nodes that have one.

What a run was started with stands in its run.json, and every later launch means that. The first launch looks
at the GPUs of all living nodes, through a task on each of them (NVML, no torch).
"""

from __future__ import annotations

from picotron_ray.checkpoint.storage.base import Storage, get_json
from picotron_ray.config.schema.compute import Precision
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import ClusterConfig
from picotron_ray.config.support.precision import chosen, precision_problem
from picotron_ray.config.validation.check import check as broken_rules
from picotron_ray.errors import ConfigError, NotFoundError
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts
from picotron_ray.runtime.ray_cluster.placement import NodeView, facts_of, living_nodes, worker_needs


def settled_precision(job: JobConfig, storage: Storage) -> tuple[Precision, str]:
    """The job's precision by name, and a line that says which and why; empty where it was named.

    Raises:
        ConfigError: no GPU is there to look at, or the config does not go with what was found.
    """
    if job.precision != "auto":
        return job.precision, ""
    found, why = choose_precision(job, storage)
    came = f"precision: auto came to {found}: {why}"
    if problems := broken_rules(job.model_copy(update={"precision": found})):
        raise ConfigError(*(f"{problem.key}: {problem.text} ({came})" for problem in problems))
    return found, came


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


def precision_here(cluster: ClusterConfig) -> Precision:
    """The precision that ``auto`` comes to for ``cluster.device`` on this machine, without a Ray."""
    found = []
    if cluster.device == "cuda":
        import torch

        found = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    return chosen(cluster.device, found)[0]


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
    found = {node: facts.capabilities for node, facts in facts_of(offering, job).items()}
    silent = [node.host for node in offering if not found.get(node.id)]
    if silent:
        raise ConfigError(
            f"precision: saw auto, but NVML tells nothing of the GPUs on {', '.join(silent)}; name one"
        )
    return chosen("cuda", (each for several in found.values() for each in several))


def able_nodes(
    job: JobConfig, nodes: list[NodeView], device: str, facts: dict[str, NodeFacts]
) -> tuple[list[NodeView], str]:
    """The nodes whose devices have the job's precision, and why the first of the others does not."""
    able, why = [], ""
    for node in nodes:
        known = facts.get(node.id, NodeFacts())
        problem = precision_problem(job, device, known.capabilities)
        if problem is None:
            able.append(node)
        elif not why:
            why = f"{problem} ({known.card_names} on {node.host})" if known.card_names else problem
    return able, why
