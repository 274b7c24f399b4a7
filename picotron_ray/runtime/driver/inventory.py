"""Inventory of the machines that a run may use: what would run there, and which of them have room for it.

Pure: the nodes' facts come in as values, from the connected cluster or from this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, LayoutError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.datasheet import profile_of
from picotron_ray.planner.memory import budget_bytes
from picotron_ray.planner.refusal import why_not_together, workers_that_do
from picotron_ray.planner.search import PlannedLayout, choose_layout
from picotron_ray.planner.snapshot_room import slot_budget
from picotron_ray.runtime.ray_cluster.node_facts import NodeFacts, snapshot_problem

LEFT_OUT = " is left out: "


@dataclass(frozen=True, slots=True)
class InventoryNode:
    """One node: its host's name, the workers that it can hold, and its facts."""

    host: str
    workers: int
    facts: NodeFacts


@dataclass(frozen=True, slots=True)
class Plan:
    """Layout that would run, and the room that it needs.

    Fields:
        planned: the layout and its cost.
        slot_bytes: of one snapshot slot of the worker that writes most, now or after a node is lost.
        left_out: a line for each node that has no room for its workers' slots.
        in_overflow: the slots go to ``snapshot.overflow_folder``, where more nodes have room.
    """

    planned: PlannedLayout
    slot_bytes: int
    left_out: tuple[str, ...] = ()
    in_overflow: bool = False


def with_those_to_come(job: JobConfig, nodes: list[InventoryNode]) -> list[InventoryNode]:
    """The nodes, and as many more like the largest of them as Ray may add."""
    missing = job.cluster.max_workers - sum(node.workers for node in nodes)
    if not job.cluster.autoscale or missing <= 0:
        return nodes
    like = max(nodes, key=lambda node: (node.facts.device_bytes, node.workers))
    return nodes + [like] * -(-missing // like.workers)


def plan(job: JobConfig, device: str, nodes: Sequence[InventoryNode], alone: bool = False) -> Plan:
    """Plan a job for these nodes, without those that have no room for snapshots.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        alone: of one machine, which no other can join; its room for snapshots is judged elsewhere.

    Raises:
        ConfigError: no layout fits, and what would do; or too few nodes have room.
    """
    left_out: list[str] = []
    staying = list(nodes)
    while True:
        planned = _planned(job, device, staying, alone)
        slot_bytes = _slot_bytes(job, device, staying, planned)
        short = [node for node in staying if not alone and _problem(job, node, slot_bytes)]
        if not short:
            return Plan(planned, slot_bytes, tuple(left_out))
        left_out += [f"node {node.host}{LEFT_OUT}{_problem(job, node, slot_bytes)}" for node in short]
        staying = [node for node in staying if node not in short]
        if sum(node.workers for node in staying) < job.cluster.min_workers:
            raise ConfigError(*left_out[:3])


def _slot_bytes(job: JobConfig, device: str, nodes: list[InventoryNode], planned: PlannedLayout) -> int:
    least = min(node.facts.device_bytes for node in nodes)

    def choose(workers: int, sizes: tuple[int, ...]) -> Layout:
        return choose_layout(job, workers, profile_of(device, least), sizes).layout

    return slot_budget(job, planned.layout, _taken(nodes, planned.layout.world_size), choose)


def _problem(job: JobConfig, node: InventoryNode, slot_bytes: int) -> str | None:
    facts = node.facts
    room = snapshot_problem(job, facts.snapshot_bytes, slot_bytes, node.workers)
    return facts.interface_problem or facts.folder_problem or room


def _planned(job: JobConfig, device: str, nodes: list[InventoryNode], alone: bool) -> PlannedLayout:
    """The cheapest of the layouts on all nodes, on those but the ones with the smallest cards, and so on."""
    found: list[PlannedLayout] = []
    memory = [_memory(job, device, node) for node in nodes]
    for least in sorted(set(memory)):
        group = [node for node, there in zip(nodes, memory, strict=True) if there >= least]
        sizes = _taken(group, job.cluster.max_workers)
        if len(group) < len(nodes) and sum(sizes) < job.cluster.min_workers:
            break
        try:
            found.append(choose_layout(job, sum(sizes), profile_of(device, least), sizes))
        except LayoutError as error:
            why = str(error)
    if not found:
        if alone and device == "cpu":
            raise ConfigError(_why_not_here(job, nodes[0]) or why)
        raise ConfigError(f"{why}{_what_would_do(job, device, nodes)}")
    return min(found, key=lambda planned: planned.cost_s)


def _memory(job: JobConfig, device: str, node: InventoryNode) -> int:
    """Memory for each worker on a node, in bytes; 0: not known."""
    return node.facts.worker_bytes(device, min(node.workers, job.cluster.max_workers))


def _taken(nodes: list[InventoryNode], most: int) -> tuple[int, ...]:
    """Workers per node, the fullest first, of at most ``most``."""
    sizes: list[int] = []
    for node in sorted(nodes, key=lambda node: (-node.workers, node.host)):
        sizes.append(min(node.workers, most - sum(sizes)))
    return tuple(size for size in sizes if size)


def _why_not_here(job: JobConfig, node: InventoryNode) -> str | None:
    """Explain a refusal by the memory that CPU workers of one machine share; None where it is not that."""

    def room(workers: int) -> float:
        return budget_bytes(job, profile_of("cpu", node.facts.worker_bytes("cpu", workers)).memory_bytes)

    return why_not_together(job, min(node.workers, job.cluster.max_workers), room)


def _what_would_do(job: JobConfig, device: str, nodes: list[InventoryNode]) -> str:
    """Name the number of workers with the largest of these cards that would do, where memory is missing."""
    best = max(nodes, key=lambda node: _memory(job, device, node))
    workers, most = sum(_taken(nodes, job.cluster.max_workers)), job.cluster.max_workers
    enough = workers_that_do(job, workers, profile_of(device, _memory(job, device, best)), best.workers)
    if enough is None:
        return ""
    cards = best.facts.card_names
    raised = f" (raise cluster.max_workers={most} too)" if enough > most else ""
    return f"; {enough} workers{f' with {cards}' if cards else ''} would do{raised}"
