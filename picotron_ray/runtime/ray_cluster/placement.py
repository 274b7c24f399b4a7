"""Ray's knowledge of nodes, behind one adapter: capacity, addresses, drain notices, and what they tell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray._private import state as ray_state
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import ClusterConfig
from picotron_ray.runtime.ray_cluster.connect import ClusterError
from picotron_ray.runtime.ray_cluster.kept_slots import kept_elsewhere, kept_here
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts, look

# a sliver of what only the head has: a soft node affinity would be ignored by an actor that needs no CPU,
# a hard one would forbid a restarted head, whose id is new
ON_HEAD = {"node:__internal_head__": 0.001}
T = TypeVar("T")
LOOK_S = 60.0
"""Longest wait for a node to say what it has; a task on it starts a process."""
KEPT_LOOK_S = 20.0
"""The same, where a run that goes on waits for it."""


@dataclass(frozen=True, slots=True)
class WorkerNeeds:
    """Ray resources that one worker reserves."""

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class NodeView:
    """One living Ray node: what it has, and what nobody holds there at the moment."""

    id: str
    host: str
    cpus: float
    gpus: float
    free_cpus: float
    free_gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)
    accelerator: str = ""  # Ray's name of the kind of its GPUs

    def capacity(self, needs: WorkerNeeds) -> int:
        """Workers that fit on the whole node, however busy it is now."""
        return _fit(self.cpus, self.gpus, needs)

    def room(self, needs: WorkerNeeds) -> int:
        """Workers that fit beside whatever holds resources there now."""
        return _fit(self.free_cpus, self.free_gpus, needs)


def _fit(cpus: float, gpus: float, needs: WorkerNeeds) -> int:
    by_cpu = int(cpus // needs.cpus) if needs.cpus else 1 << 30
    by_gpu = int(gpus // needs.gpus) if needs.gpus else 1 << 30
    return min(by_cpu, by_gpu)


def accelerator_of(resources: Mapping[str, float]) -> str:
    """Kind of the GPUs of a node, by the resources that Ray gives it; empty where it does not say.

    >>> accelerator_of({"CPU": 8.0, "GPU": 8.0, "accelerator_type:H100": 1.0})
    'H100'
    """
    prefix = "accelerator_type:"
    return next((name.removeprefix(prefix) for name in resources if name.startswith(prefix)), "")


def living_nodes() -> list[NodeView]:
    """All nodes that Ray holds to be alive, in a stable order."""
    free = ray_state.state.available_resources_per_node()
    nodes = [
        NodeView(
            id=node["NodeID"],
            host=node["NodeManagerAddress"],
            cpus=node["Resources"].get("CPU", 0.0),
            gpus=node["Resources"].get("GPU", 0.0),
            free_cpus=free.get(node["NodeID"], {}).get("CPU", 0.0),
            free_gpus=free.get(node["NodeID"], {}).get("GPU", 0.0),
            labels=dict(node.get("Labels") or {}),
            accelerator=accelerator_of(node["Resources"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: node.id)


def worker_needs(cluster: ClusterConfig, nodes: list[NodeView]) -> WorkerNeeds:
    """One GPU each where GPUs are wanted and offered, else CPU slots alone."""
    gpus = any(node.gpus for node in nodes) if cluster.device == "auto" else cluster.device == "cuda"
    return WorkerNeeds(cpus=cluster.cpus_per_worker, gpus=1.0 if gpus else 0.0)


def draining_nodes() -> dict[str, float]:
    """Nodes under a drain notice and their deadlines, seconds since the epoch (0: none given).

    ``ray.nodes()`` keeps calling them alive; only Ray's private state tells (true of 2.56 to 2.60).
    """
    return {node: ms / 1000 for node, ms in ray_state.state.get_draining_nodes().items()}


def restarting(actor: ActorHandle) -> bool:
    """Whether Ray is starting the process of an actor again; only its private state tells (true of 2.60)."""
    found: Any = ray_state.actors(actor_id=actor._actor_id.hex())
    return bool(found) and found["State"] == "RESTARTING"


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    """Scheduling on this node or nowhere."""
    return NodeAffinitySchedulingStrategy(node, soft=False)


def kept_on(nodes: Sequence[NodeView], run: str, folder: str, discard: bool) -> dict[str, int]:
    """Newest step that each node keeps of a run, wherever it does, deleted there where ``discard``.

    Raises:
        ClusterError: a node does not answer; the others have done as they were told.
    """
    found = _ask(LOOK_S, nodes, kept_here, run, folder, discard)
    silent = [node.host for node in nodes if node.id not in found]
    if silent:
        raise ClusterError(
            f"cluster: saw no answer of {', '.join(silent)} for {LOOK_S:g} s, expected what they keep of"
            f" run {run!r}; ask again once they answer, or are gone"
        )
    return {node: step for node, step in found.items() if step is not None}


def facts_of(nodes: Sequence[NodeView], job: JobConfig) -> dict[str, NodeFacts]:
    """Ask nodes for their facts; by node, without those that do not answer in time."""
    snapshot = job.snapshot
    asked = (snapshot.folder, job.name, snapshot.overflow_folder, None, job.cluster.interface)
    return _ask(LOOK_S, nodes, look, *asked)


def keeping_nodes(nodes: Sequence[NodeView], job: JobConfig) -> dict[str, int]:
    """Newest step that nodes keep of a run, by node; without those that keep none or do not answer soon."""
    found = _ask(KEPT_LOOK_S, nodes, kept_here, job.name, job.snapshot.folder, False)
    return {node: step for node, step in found.items() if step is not None}


def connected() -> bool:
    """Whether this process is connected to a cluster."""
    return bool(ray.is_initialized())


def nodes_keeping_elsewhere(
    nodes: Sequence[NodeView], run: str, bases: Sequence[str], identity: str
) -> list[tuple[int, str]]:
    """Findings of ``kept_elsewhere`` on those nodes that answer soon."""
    found = _ask(KEPT_LOOK_S, nodes, kept_elsewhere, run, bases, identity)
    return [kept for kept in found.values() if kept is not None]


def ask_nodes(nodes: Sequence[NodeView], work: Callable[..., T], *arguments: Any) -> dict[str, T]:
    """Run a function of this package on nodes; by node, what those answer that do so soon."""
    return _ask(LOOK_S, nodes, work, *arguments)


def _ask(
    timeout_s: float, nodes: Sequence[NodeView], work: Callable[..., T], *arguments: Any
) -> dict[str, T]:
    """Run a function on all nodes at once; by node, what those answer that do so in time."""
    task: Any = ray.remote(work)
    asked = {}
    for node in nodes:
        here = task.options(num_cpus=0, max_retries=0, scheduling_strategy=on_node(node.id))
        asked[node.id] = here.remote(*arguments)
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
    found = {}
    for node_id, answer in asked.items():
        with contextlib.suppress(RayError):
            found[node_id] = ray.get(answer, timeout=0)  # else it is gone, or too slow
    return found
