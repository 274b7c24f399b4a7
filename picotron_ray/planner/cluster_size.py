"""Size of the cluster that a plan needs: nodes and spares, CPUs, host memory, /dev/shm, network, storage."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from picotron_ray.layout.layout import Layout
from picotron_ray.planner.goals import communication_s
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.model_sizes import parameter_count
from picotron_ray.planner.plan import PlanReport, for_devices
from picotron_ray.planner.search import choose_layout, distinct
from picotron_ray.planner.snapshot_room import slot_budget

FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
"""Unexpected interruptions of Llama 3's run (Dubey et al. 2024, section 3.3.4)."""
REPAIR_HOURS = 48.0
"""Hours that a failed node is away."""
CPUS_PER_GPU = 4
"""Cores for a worker: its loop, its data, digests and copies of snapshots."""
PROCESS_BYTES = 6 * 2**30
"""Host memory of a worker with CUDA and NCCL loaded, besides its slots."""
NODE_BYTES = 8 * 2**30
"""Host memory of a node's Ray, its agent and the system."""
OBJECT_STORE_BYTES = 2 * 2**30
"""Of /dev/shm: Ray's object store and NCCL's segments."""
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """Machines, memory and storage to order for a plan.

    Fields:
        nodes, spares: machines that train, and more that wait for the loss of one.
        workers_per_node, cpus_per_worker: of each machine; ``cpus`` has the system's share too.
        host_bytes: memory of a machine, its /dev/shm included.
        shm_bytes: of a machine's /dev/shm: every worker's snapshot slots, now and after a node is lost.
        network_s: seconds of a step in which computing waits for communication.
        network_share: the same as a share of the step.
        commit_bytes, storage_bytes_day: of one commit, and of all that a day writes.
        storage_held_bytes: that are kept at any time.
    """

    nodes: int
    spares: int
    workers_per_node: int
    cpus_per_worker: int
    cpus: int
    host_bytes: int
    shm_bytes: int
    network_s: float
    network_share: float
    commit_bytes: float
    storage_bytes_day: float
    storage_held_bytes: float

    def to_dict(self) -> dict[str, Any]:
        """The size as plain data."""
        return asdict(self)


def cluster_size(plan: PlanReport) -> ClusterSize:
    """Size a cluster for the best layout of a plan."""
    layout, job = plan.best.layout, plan.job
    sizes = plan.hardware.node_sizes(layout.world_size)
    workers = max(sizes)
    slot = slot_budget(job, layout, sizes, lambda left, nodes: _later(plan, left, nodes))
    shm = OBJECT_STORE_BYTES + workers * job.snapshot.slots * slot
    estimate = memory_estimate(job, layout)
    offloaded = int(estimate.host_state_bytes + estimate.host_activation_bytes)
    least = CPUS_PER_GPU if plan.hardware.device == "cuda" else 1
    cpus = max(least, math.ceil(job.cluster.cpus_per_worker))
    step_s = plan.best.cost.total_s
    commit = _commit_bytes(plan)
    commits = DAY_S / (step_s * job.checkpoint.interval_steps)
    return ClusterSize(
        nodes=len(sizes),
        spares=spares(len(sizes), workers),
        workers_per_node=workers,
        cpus_per_worker=cpus,
        cpus=workers * cpus + 2,
        host_bytes=NODE_BYTES + shm + workers * (PROCESS_BYTES + offloaded),
        shm_bytes=shm,
        network_s=communication_s(plan.best.cost),
        network_share=communication_s(plan.best.cost) / step_s,
        commit_bytes=commit,
        storage_bytes_day=commit * commits,
        storage_held_bytes=commit * (job.checkpoint.keep_last + 1),
    )


def spares(nodes: int, node_size: int) -> int:
    """Nodes expected to be away at a time, at least one where there are several.

    >>> spares(1, 8), spares(8, 8), spares(2048, 8)
    (0, 1, 16)
    """
    if nodes == 1:
        return 0
    return max(1, math.ceil(nodes * node_size * FAILURES_PER_GPU_HOUR * REPAIR_HOURS))


def _commit_bytes(plan: PlanReport) -> float:
    """Bytes of a commit: weights and moments once, however many replicas hold them."""
    job = plan.job
    whole = memory_estimate(job, Layout()).kept_bytes
    return whole or 12.0 * parameter_count(job.model)


def _later(plan: PlanReport, left: int, nodes: tuple[int, ...]) -> Layout:
    """The layout of the workers that a loss leaves."""
    job = for_devices(plan.job, left, plan.hardware.device)
    return choose_layout(job, left, plan.hardware.profile, distinct(nodes)).layout


def size_patches(size: ClusterSize) -> str:
    """``size.yaml`` of the GPU overlay: JSON patches of the worker group, for this size."""
    gib = 2**30
    memory, shm = math.ceil(size.host_bytes / gib), math.ceil(size.shm_bytes / gib)
    nodes, most = size.nodes, size.nodes + size.spares
    box = f'{{cpu: "{size.cpus}", memory: {memory}Gi, nvidia.com/gpu: "{size.workers_per_node}"}}'
    group = "/spec/workerGroupSpecs/0"
    return (
        "# Written by `picotron-ray plan --for cluster --write-size`.\n"
        f"- {{op: replace, path: {group}/minReplicas, value: {min(1, nodes)}}}\n"
        f"- {{op: replace, path: {group}/replicas, value: {nodes}}}\n"
        f"- {{op: replace, path: {group}/maxReplicas, value: {most}}}\n"
        "- op: replace\n"
        f"  path: {group}/template/spec/containers/0/resources\n"
        f"  value:\n    requests: {box}\n    limits: {box}\n"
        "- op: replace\n"
        f"  path: {group}/template/spec/volumes/0/emptyDir/sizeLimit\n"
        f"  value: {shm}Gi\n"
        "- op: add\n"
        f"  path: {group}/template/spec/tolerations\n"
        "  value:\n    - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}\n"
    )
