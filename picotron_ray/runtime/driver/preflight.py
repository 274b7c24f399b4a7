"""Checks of a job before a run starts: room for snapshots, ports, trackers, an earlier run, the cluster.

Each answers a question of one of ``resolve_job``'s steps, which say the order and what is touched.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from picotron_ray.checkpoint.snapshot.slot_pool import choose_folder
from picotron_ray.checkpoint.storage.base import Storage, get_json
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.resume import check_resume
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.devices import device_problems, offload_problems
from picotron_ray.config.support.extras import needed_extras
from picotron_ray.config.support.kernels import attention_problem, overlap_problem
from picotron_ray.errors import ConfigError, NotFoundError, SlotError
from picotron_ray.layout.layout import Layout
from picotron_ray.observability.nvml import Gpus
from picotron_ray.observability.ports import check_ports
from picotron_ray.observability.trackers import check_trackers
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.runtime.driver.inventory import InventoryNode, Plan, plan, with_those_to_come
from picotron_ray.runtime.driver.resolve_precision import able_nodes
from picotron_ray.runtime.ray_cluster.connect import run_folders
from picotron_ray.runtime.ray_cluster.kept_slots import kept_bytes
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts
from picotron_ray.runtime.ray_cluster.placement import facts_of, living_nodes, worker_needs


def snapshot_note(job: JobConfig, layout: Layout) -> str | None:
    """Check the room for all slots on one machine, each as large as its worker may need; returns a warning.

    Raises:
        ConfigError: there is too little.
    """
    estimate = memory_estimate(job, layout)
    slots = job.snapshot.slots * layout.world_size
    need = int(estimate.state_bytes + estimate.host_state_bytes) * slots
    need -= sum(map(kept_bytes, run_folders(job)))  # committed, and gone, before the first slot is made
    try:
        _, note = choose_folder(job.snapshot.folder, job.snapshot.overflow_folder, need)
    except SlotError as error:
        raise ConfigError(f"snapshot.folder: {error}") from error
    return note


def check_services(job: JobConfig) -> None:
    """Raise ConfigError where metrics' ports are taken or a tracker cannot be used."""
    check_ports(job.metrics, local=not os.environ.get("RAY_ADDRESS"))
    check_trackers(job.trackers)


def check_resume_step(job: JobConfig, storage: Storage) -> None:
    """Check that the step to resume from was committed; raises ConfigError naming those that were."""
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
        saved: dict[str, Any] = get_json(storage, "run.json")["config"]
    except NotFoundError:
        return []
    return check_resume(saved, job)


def check_cluster(job: JobConfig, own_ray: bool = False) -> Plan | None:
    """Check that the connected cluster can host ``min_workers``, with the kernels and precision asked for,
    and that a layout and its snapshots fit on its nodes; returns what would run there.

    Args:
        own_ray: it was started for this run, on this machine, which was looked at before. None is returned
            then, and where nodes are still to come (``cluster.autoscale``) and none is there yet.

    Raises:
        ConfigError: where not.
    """
    nodes = living_nodes()
    needs = worker_needs(job.cluster, nodes)
    cp = 1 if job.layout.cp == "auto" else job.layout.cp
    device = "cuda" if needs.gpus else "cpu"
    facts = {} if own_ray and device == "cpu" else facts_of(nodes, job)
    able, unable = able_nodes(job, nodes, device, facts)
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
    if own_ray:
        return None
    told = [node for node in able if node.id in facts]
    offered = [InventoryNode(n.host, n.capacity(needs), _of(device, facts[n.id])) for n in told]
    hosts = [node for node in offered if node.workers]
    if not hosts:
        return None
    silent = [f"node {n.host} did not say what it has" for n in nodes if n.id not in facts]
    planned = plan(job, device, with_those_to_come(job, hosts))
    return replace(planned, left_out=(*planned.left_out, *silent))


def _of(device: str, facts: NodeFacts) -> NodeFacts:
    """The facts that count for workers on this kind of device."""
    return facts if device == "cuda" else replace(facts, cards=[])


def plan_here(job: JobConfig) -> Plan:
    """Plan for a Ray of the run's own, on this machine; room for slots is `snapshot_note`'s to judge.

    Raises:
        ConfigError: no layout fits.
    """
    cards = [] if job.cluster.device == "cpu" else Gpus().cards()
    workers = min(job.cluster.max_workers, len(cards) or job.cluster.max_workers)
    here = InventoryNode(os.uname().nodename, workers, NodeFacts(cards))
    return plan(job, "cuda" if cards else "cpu", [here], slots=False)


def _missing_extras(job: JobConfig) -> dict[str, str]:
    """Find the extras that the job needs and this environment, which workers share, lacks; by config key."""
    return {extra.key: extra.missing for extra in needed_extras(job) if find_spec(extra.module) is None}
