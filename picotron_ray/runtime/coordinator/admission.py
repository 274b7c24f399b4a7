"""Admission of a node: what its agent says of it when it joins, and what speaks against it or its workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.support.precision import precision_problem
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.lineage import slim
from picotron_ray.runtime.ray_cluster.kept_slots import foreign_text
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts, snapshot_problem
from picotron_ray.runtime.ray_cluster.placement import NodeView, WorkerNeeds
from picotron_ray.runtime.run_storage.data_record import data_problem

log = logging.getLogger(__name__)


def facts_of(hello: Mapping[str, Any]) -> NodeFacts:
    """Facts that an agent tells of its node; one of an older version, which is refused by name, has none."""
    return hello.get("facts") or NodeFacts()


def traits_of(job: JobConfig, view: NodeView, hello: Mapping[str, Any], needs: WorkerNeeds) -> m.NodeTraits:
    """Traits of a node, from what Ray and its agent (``hello``) say."""
    workers = min(view.capacity(needs), job.cluster.max_workers)
    facts, gpus = facts_of(hello), bool(needs.gpus)
    memory_bytes = facts.worker_bytes("cuda" if gpus else "cpu", workers)
    domain = view.labels.get(job.cluster.failure_domain_label or "", "")
    return m.NodeTraits(view.id, memory_bytes, domain, gpus, facts.card_names if gpus else "")


def joined(
    traits: m.NodeTraits, capacity: int, refused: str = "", hello: Mapping[str, Any] | None = None
) -> m.NodeJoined:
    """Return the event of a node that joins, or whose capacity has changed.

    Args:
        refused: why it may not take part; empty: it may.
        hello: what its agent says, where it joins.
    """
    said = hello or {}
    kept_by = said.get("kept_by")
    return m.NodeJoined(
        traits.node,
        capacity,
        refused,
        traits.device_bytes,
        said.get("kept", ()),
        None if kept_by is None else slim(kept_by),  # each of thousands of nodes names the same one
        traits.domain,
        traits.has_gpus,
        hardware=traits.hardware,
    )


def idle_workers(hello: Mapping[str, Any], data: str) -> list[str]:
    """Workers that are in no generation, and see the run's data.

    Any other one is ended as a stranger. The one that is started in its place is refused by name.

    Args:
        hello: what their agent says.
        data: fingerprint of the run's data; "": nobody knows it.
    """
    busy, notes = {worker for worker, *_ in hello["busy"]}, hello.get("data", {})
    found = []
    for worker in hello["workers"]:
        if worker in busy:
            continue
        problem = data_problem(data, notes.get(worker, "none yet"))
        if problem:
            log.warning("worker %s is not taken in: %s", worker, problem)
        else:
            found.append(worker)
    return found


def objection(
    job: JobConfig,
    hello: Mapping[str, Any],
    versions: Mapping[str, str],
    device: str,
    slot_bytes: int,
    workers: int,
) -> str:
    """Reason for which a node may not take part; empty: it may.

    Args:
        hello: what its agent says.
        versions: what is expected of the software there.
        slot_bytes: of one snapshot slot of one worker.
        workers: how many it is to host.
    """
    theirs, facts = hello["versions"], facts_of(hello)
    seen = [f"{k} {theirs[k]} (expected {v})" for k, v in versions.items() if theirs[k] != v]
    problem = precision_problem(job, device, facts.capabilities)
    room = snapshot_problem(job, facts.snapshot_bytes, slot_bytes, workers)
    precision = f"precision: {problem}" if problem else ""
    foreign = f"name: {foreign_text(hello['foreign'], job.name)}" if "foreign" in hello else ""
    own = hello.get("problem", "")
    return "; ".join(filter(None, [own, *seen, precision, facts.folder_problem, room, foreign]))
