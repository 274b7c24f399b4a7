"""Checks of a job before a run starts: room for snapshots, ports, trackers, an earlier run, the cluster.

Each answers a question of one of ``resolve_job``'s steps, which say the order and what is touched.
"""

from __future__ import annotations

import os
from dataclasses import replace

from picotron_ray.checkpoint.storage.base import JSON_BYTES, Storage, get_bounded
from picotron_ray.checkpoint.store.run_log import RunLog, decode_entry, entry_key
from picotron_ray.config.resume import check_resume
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.comm import nccl_problems
from picotron_ray.config.support.devices import device_problems, offload_problems
from picotron_ray.config.support.extras import is_there, needed_extras
from picotron_ray.config.support.kernels import attention_problem, overlap_problem
from picotron_ray.config.support.memory import memory_problems
from picotron_ray.coordinator.policies.rewind import owed_step
from picotron_ray.errors import ConfigError, CorruptError, NotFoundError
from picotron_ray.observability.nvml import Card, Gpus, visible
from picotron_ray.observability.ports import check_ports
from picotron_ray.observability.trackers import check_trackers
from picotron_ray.runtime.driver.inventory import InventoryNode, Plan, plan, with_those_to_come
from picotron_ray.runtime.driver.resolve_precision import able_nodes
from picotron_ray.runtime.driver.snapshot_folder import plan_with_folder
from picotron_ray.runtime.ray_cluster import temporary_room
from picotron_ray.runtime.ray_cluster.connect import refuse_unauthenticated, run_folders
from picotron_ray.runtime.ray_cluster.host_memory import host_bytes
from picotron_ray.runtime.ray_cluster.interfaces import interface_problem
from picotron_ray.runtime.ray_cluster.kept_slots import foreign_step, foreign_text, kept_elsewhere, kept_step
from picotron_ray.runtime.ray_cluster.local_ray import refuse_long_folder
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts
from picotron_ray.runtime.ray_cluster.placement import (
    LOOK_S,
    connected,
    facts_of,
    living_nodes,
    nodes_keeping_elsewhere,
    worker_needs,
)
from picotron_ray.runtime.run_storage.generation_entries import read_generations
from picotron_ray.runtime.run_storage.run_json import newest_config

NO_RUN = "none yet"
"""Identity of the run in storage that was emptied, or is another one: kept slots are of none there."""


def check_services(job: JobConfig) -> None:
    """Raise ConfigError where Ray would ask nobody who they are, the interface is not there, ports are taken,
    Ray's folder has no room, or a tracker is no use.
    """
    refuse_unauthenticated(job)
    local = not os.environ.get("RAY_ADDRESS")
    if local:
        refuse_long_folder(job.name)
    if local and (why := temporary_room.room_problem()):
        raise ConfigError(f"TMPDIR: {why}, where Ray keeps its sockets and logs; {temporary_room.MEND}")
    if local and (why := interface_problem(job.cluster.interface, os.uname().nodename)):
        raise ConfigError(why)
    check_ports(job.metrics, local)
    check_trackers(job.trackers, job.name)


def check_resume_step(job: JobConfig, storage: Storage) -> None:
    """Check that the step to resume from was committed; raises ConfigError naming those that were.

    One that the run has gone back to before is no longer asked for, and may be retired since.
    """
    if job.checkpoint.resume_step is None:
        return
    log = RunLog(storage)
    log.refresh()
    wanted = owed_step(job, read_generations(log.entries(), log.commits()))
    if wanted is None:
        return
    steps = sorted({int(entry.body["step"]) for entry in log.commits()})
    if wanted not in steps:
        raise ConfigError(
            f"checkpoint.resume_step: saw {wanted}, expected a committed step of run {job.name!r}: {steps};"
            " leave it out to resume from the newest"
        )


def _check_kept_slots(job: JobConfig, storage: Storage) -> None:
    """Refuse to begin where this machine keeps uncommitted slots of another run of that name."""
    folders = run_folders(job)
    if kept_step(folders) is None:
        return
    try:
        first = decode_entry(1, get_bounded(storage, entry_key(1), JSON_BYTES)).nonce
    except NotFoundError:
        first = NO_RUN
    except CorruptError:
        return  # not known
    step = foreign_step(folders, first)
    if step is not None and first == NO_RUN:
        raise ConfigError(
            f"storage.url: saw nothing of run {job.name!r} in {storage.where}, but this machine keeps step"
            f" {step} of a run of that name, which is not committed; where the folder was emptied or removed,"
            " restore it from a copy and launch again, else give the storage.url that run had, choose another"
            " name, or"
            f" `picotron-ray stop {job.name} --discard`"
        )
    if step is not None:
        raise ConfigError(f"name: {foreign_text(step, job.name)}")


def check_kept_elsewhere(job: JobConfig, storage: Storage, own_ray: bool) -> None:
    """Refuse to go on from less than a launch with another ``snapshot.folder`` kept: no agent looks there.

    Args:
        own_ray: this machine is the run's only one; else all nodes of the cluster are asked, where this
            process is connected to it.

    Raises:
        ConfigError: a newer state than the newest commit is kept in another folder.
    """
    log = RunLog(storage)
    log.refresh()
    identity = log.identity or NO_RUN
    bases = [base for base in (job.snapshot.folder, job.snapshot.overflow_folder) if base]
    kept = [found] if (found := kept_elsewhere(job.name, bases, identity)) else []
    if not own_ray and connected():
        kept += nodes_keeping_elsewhere(living_nodes(), job.name, bases, identity)
    step, folder = max(kept, default=(0, ""))
    if step > max((int(entry.body["step"]) for entry in log.commits()), default=0):
        raise ConfigError(
            f"snapshot.folder: saw {job.snapshot.folder}, but an earlier launch of run {job.name!r} kept step"
            f" {step}, which is not committed, in {folder}; launch with snapshot.folder={folder} to commit"
            f" it, or delete it with `picotron-ray stop {job.name} --discard`"
        )


def check_same_run(job: JobConfig, storage: Storage) -> list[str]:
    """Compare with the run of that name in storage: one line per changed key; ConfigError where refused."""
    _check_kept_slots(job, storage)
    saved = newest_config(storage)
    return [] if saved is None else check_resume(saved, job)


def check_nodes(job: JobConfig, relative_url: str = "") -> None:
    """Check that the connected cluster has a GPU where one is asked for, and storage that all nodes share.

    Args:
        relative_url: ``storage.url`` as it was written, where that depends on the present folder; else "".

    Raises:
        ConfigError: where not.
    """
    nodes, device = living_nodes(), job.cluster.device
    if device == "cuda" and not job.cluster.autoscale and not any(node.gpus for node in nodes):
        raise ConfigError(
            f"cluster.device: saw cuda, but none of the cluster's {len(nodes)} nodes offers Ray a GPU; use"
            " auto or cpu, add a node that has one, or let Ray add nodes (cluster.autoscale)"
        )
    if relative_url and (len(nodes) > 1 or job.cluster.autoscale):
        several = f"{len(nodes)} nodes" if len(nodes) > 1 else "nodes still to come (cluster.autoscale)"
        raise ConfigError(
            f"storage.url: saw {relative_url!r} on a cluster of {several}, where that means a folder of one"
            " of them; give an absolute folder that every node sees, or s3://bucket/prefix"
        )


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
        "kernels.attention": attention_problem(job, device) or missing.get("kernels.attention"),
        "kernels.tp_overlap": overlap_problem(job, device),
        **offload_problems(job, device),
        **device_problems(job, device),
        **memory_problems(job, device),
        **nccl_problems(job, device),
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
    if able and not facts:
        raise ConfigError(
            f"cluster: none of {len(nodes)} nodes said within {LOOK_S:g} s what it has, so that nothing can"
            " be planned; look at the logs of their raylets, then launch again"
        )
    told = [node for node in able if node.id in facts]
    offered = [InventoryNode(n.host, n.capacity(needs), _of(device, facts[n.id])) for n in told]
    hosts = [node for node in offered if node.workers]
    if not hosts:
        return None
    silent = [f"node {n.host} did not say what it has" for n in nodes if n.id not in facts]
    planned, in_overflow, note = plan_with_folder(job, device, with_those_to_come(job, hosts))
    notes = (*([note] if note else []), *planned.left_out, *silent)
    return replace(planned, left_out=notes, in_overflow=in_overflow)


def _of(device: str, facts: NodeFacts) -> NodeFacts:
    """The facts that count for workers on this kind of device."""
    return facts if device == "cuda" else replace(facts, cards=[])


def cards_here(job: JobConfig) -> list[Card]:
    """GPUs of this machine for the workers of a Ray of its own; none where they run on CPUs.

    Raises:
        ConfigError: GPUs are asked for and none is there, or too few are.
    """
    device, least = job.cluster.device, job.cluster.min_workers
    cards = [] if device == "cpu" else visible(Gpus().cards())
    if device == "cuda" and not cards:
        raise ConfigError(
            "cluster.device: saw cuda, but this machine shows no GPU (by NVML and CUDA_VISIBLE_DEVICES); use"
            " auto or cpu, or set RAY_ADDRESS to a cluster that has GPUs"
        )
    if cards and len(cards) < least:
        raise ConfigError(
            f"cluster.min_workers: saw {least}, but this machine shows {len(cards)} GPUs, one for a worker;"
            " lower it, use cluster.device=cpu, or set RAY_ADDRESS to a cluster that has more"
        )
    return cards


def plan_here(job: JobConfig) -> Plan:
    """Plan for a Ray of the run's own, on this machine; room for slots is `overflow_here`'s to judge.

    Raises:
        ConfigError: as `cards_here`, or no layout fits.
    """
    cards = cards_here(job)
    workers = min(job.cluster.max_workers, len(cards) or job.cluster.max_workers)
    here = InventoryNode(os.uname().nodename, workers, NodeFacts(cards, host_bytes=host_bytes()))
    return plan(job, "cuda" if cards else "cpu", [here], alone=True)


def _missing_extras(job: JobConfig) -> dict[str, str]:
    """Find the extras that the job needs and this environment, which workers share, lacks; by config key."""
    return {extra.key: extra.missing for extra in needed_extras(job) if not is_there(extra.module)}
