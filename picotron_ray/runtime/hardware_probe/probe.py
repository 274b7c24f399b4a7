"""Probe of all nodes: one actor per worker slot measures at the same time as the others, through Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import ray

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.observability.gpu_topology import (
    GpuInventory,
    busy_lines,
    check_topology,
    gpus_here,
    slowest_link,
)
from picotron_ray.planner.datasheet import DATA_SHEETS
from picotron_ray.planner.hardware_profile import (
    CollectivePoint,
    HardwareProfile,
    LinkClass,
    MatmulPoint,
    outliers,
)
from picotron_ray.planner.words import counted
from picotron_ray.runtime.hardware_probe.worker import ProbeWorker, sizes_for
from picotron_ray.runtime.ray_cluster.placement import (
    NodeView,
    WorkerNeeds,
    ask_nodes,
    living_nodes,
    on_node,
    worker_needs,
)

GROUPS = (2, 4, 8)
COMPUTE_SHARE = 0.6
"""Of the budget; the rest is for groups."""
ANSWER_S = 120.0


def probe(
    job: JobConfig,
    budget_s: float,
    say: Callable[[str], None] = lambda line: None,
    topology: tuple[str, str] | None = None,
) -> HardwareProfile:
    """Measure the nodes of the connected Ray.

    Args:
        job: whose workers, devices and CPUs per worker it measures.
        say: told a line per part.
        topology: text and name of a file of GPU groups that the drivers must agree with.

    Raises:
        ConfigError: no node has room for a worker, GPUs are busy (which of them), or NVML groups them
            otherwise than the file.
    """
    nodes = living_nodes()
    needs = worker_needs(job.cluster, nodes)
    slots = _slots(nodes, needs, job.cluster.max_workers)
    if not slots:
        raise ConfigError(_why_no_slots(nodes, needs))
    device = "cuda" if needs.gpus else "cpu"
    gpus = _idle_gpus(slots, topology) if needs.gpus or topology else {}
    actor: Any = ray.remote(ProbeWorker)
    workers = [
        actor.options(
            num_cpus=needs.cpus, num_gpus=needs.gpus, scheduling_strategy=on_node(node.id), max_restarts=0
        ).remote(device, int(job.cluster.cpus_per_worker))
        for node, count in slots
        for _ in range(count)
    ]
    try:
        link = slowest_link(gpus[_fullest(slots).id]) if gpus else "loopback"
        found = _measured(workers, slots, device, budget_s, say, link)
    finally:
        for worker in workers:
            ray.kill(worker)
    label = job.cluster.failure_domain_label
    nodes_now = []
    for (node, _), figures in zip(slots, found.nodes, strict=True):
        groups = {"nvlink": gpus[node.id].nvlink, "pcie": gpus[node.id].pcie} if node.id in gpus else {}
        domain = node.labels.get(label or "", "")
        nodes_now.append(figures.model_copy(update={**groups, "domain": domain}))
    return found.model_copy(update={"nodes": tuple(nodes_now)})


def _why_no_slots(nodes: Sequence[NodeView], needs: WorkerNeeds) -> str:
    """The line where no node takes a worker: none has a GPU, none is large enough, or all are busy."""
    if needs.gpus and not any(node.gpus for node in nodes):
        seen = f"no GPU on {counted(len(nodes), 'node')}"
        return f"probe: saw {seen}, expected one for --device cuda; say --device cpu, or add a node with GPUs"
    gpus = f" and {counted(int(needs.gpus), 'GPU')}" if needs.gpus else ""
    worker = f"a worker of {needs.cpus:g} CPU{'s' * (needs.cpus != 1)}{gpus}"
    if any(node.capacity(needs) for node in nodes):
        return f"probe: saw no node with room for {worker} now, expected one; wait until other work has ended"
    largest = max((node.cpus for node in nodes), default=0.0)
    return (
        f"probe: saw no node as large as {worker}, the largest has {largest:g} CPUs, expected one; lower"
        " --cpus-per-worker, or add a larger node"
    )


def _fullest(slots: list[tuple[NodeView, int]]) -> NodeView:
    return max(slots, key=lambda slot: slot[1])[0]


def _idle_gpus(
    slots: list[tuple[NodeView, int]], topology: tuple[str, str] | None
) -> dict[str, GpuInventory]:
    """GPUs by node, before any worker touches one. Raises ConfigError where some are busy."""
    found = ask_nodes([node for node, _ in slots], gpus_here)
    hosts = {node.id: node.host for node, _ in slots}
    if silent := [host for node, host in hosts.items() if node not in found]:
        raise ConfigError(
            f"probe: saw no answer of {', '.join(sorted(silent))} about its GPUs, expected one of each; see"
            " that the package and NVML work there, or take other nodes"
        )
    busy = busy_lines({hosts[node]: inventory for node, inventory in found.items()})
    if busy:
        raise ConfigError(
            f"probe: saw busy {'; '.join(busy)}, expected idle GPUs; end those processes or take other nodes"
        )
    if topology is not None:
        check_topology(*topology, list(found.values()))
    return found


def _slots(nodes: Sequence[NodeView], needs: WorkerNeeds, most: int) -> list[tuple[NodeView, int]]:
    """Nodes and the workers that each takes now, at most ``most`` in all."""
    found, left = [], most
    for node in nodes:
        count = min(node.room(needs), left)
        if count > 0:
            found.append((node, count))
            left -= count
    return found


def _measured(
    workers: list[Any],
    slots: list[tuple[NodeView, int]],
    device: str,
    budget_s: float,
    say: Callable[[str], None],
    link: LinkClass,
) -> HardwareProfile:
    places = ray.get([worker.where.remote() for worker in workers], timeout=ANSWER_S)
    say(f"{counted(len(workers), 'worker')} on {counted(len(slots), 'node')}: {places[0][2]}")
    address, port = slots[0][0].host, places[0][1]
    world = len(workers)
    ray.get(
        [worker.join.remote(rank, world, address, port) for rank, worker in enumerate(workers)],
        timeout=ANSWER_S,
    )
    dtypes = ["bf16", "fp16", "fp32"] if device == "cuda" else ["fp32", "bf16", "fp64"]
    computed = _all(workers, budget_s, "compute", dtypes, COMPUTE_SHARE * budget_s)
    say("matrix products, attention and memory are measured")
    groups, pairs = _groups(slots, link), _pairs(slots, link)
    counts = [count for _, count in slots]
    left_s = (1 - COMPUTE_SHARE) * budget_s / max(1, len(groups) + len(pairs))
    timed = _all(workers, budget_s, "collectives", groups, left_s)
    sent = _all(workers, budget_s, "messages", pairs, left_s)
    sums = _slowest(timed)
    where = f"{counted(len(groups), 'group')}, messages between {counted(len(pairs), 'pair')}"
    say(f"collectives are measured in {where}")
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    figures = [workers[first].figures.remote(count) for first, count in zip(firsts, counts, strict=True)]
    memory = [workers[first].memory_bytes.remote(count) for first, count in zip(firsts, counts, strict=True)]
    names = [f"{host} worker {rank}" for rank, (host, _, _) in enumerate(places)]
    rates = {name: _rate(one["matmuls"]) for name, one in zip(names, computed, strict=True)}
    return HardwareProfile(
        name=places[0][2],
        device=device,  # type: ignore[arg-type]
        device_name=places[0][2],
        peak_flops=peak_flops(places[0][2]),
        memory_bytes=min(ray.get(memory, timeout=ANSWER_S)),
        memory_bytes_s=median(one["memory_bytes_s"] for one in computed),
        host_bytes_s=median(one["host_bytes_s"] for one in computed),
        host_link_bytes_s=median(one["host_link_bytes_s"] for one in computed),
        block_s=median(one["block_s"] for one in computed),
        matmuls=tuple(_middle([one["matmuls"] for one in computed])),
        attention=tuple(computed[len(computed) // 2]["attention"]),
        collectives=tuple(sums),
        messages=tuple(point for points in sent for point in points),
        nodes=tuple(ray.get(figures, timeout=ANSWER_S)),
        outliers=outliers(rates),
        cuts=(
            *dict.fromkeys(cut for one in computed for cut in one["cuts"]),
            *_sizes_left_out(groups, sums, len(sizes_for(device))),
        ),
    )


def _sizes_left_out(
    groups: Sequence[tuple[str, Sequence[int]]], sums: Sequence[CollectivePoint], sizes: int
) -> list[str]:
    """Name the groups in which not all sizes were timed."""
    timed: Counter[tuple[str, int]] = Counter(
        (point.link, point.ranks) for point in sums if point.kind == "all_reduce"
    )
    return [
        f"left out: {sizes - timed[link, len(ranks)]} of {sizes} sizes of collectives over {len(ranks)} ranks"
        f" ({link}) (--budget-s)"
        for link, ranks in groups
        if timed[link, len(ranks)] < sizes
    ]


def _all(workers: list[Any], budget_s: float, method: str, *arguments: Any) -> list[Any]:
    """Answers of a method that all workers run at once."""
    asked = [getattr(worker, method).remote(*arguments) for worker in workers]
    return list(ray.get(asked, timeout=ANSWER_S + 4 * budget_s))


def _pairs(slots: list[tuple[NodeView, int]], link: LinkClass) -> list[tuple[str, list[int]]]:
    """Pairs to send between: two workers of the fullest node, and one of each of the first two nodes."""
    counts = [count for _, count in slots]
    found: list[tuple[str, list[int]]] = []
    if max(counts) > 1:
        first = sum(counts[: counts.index(max(counts))])
        found.append((link, [first, first + 1]))
    if len(counts) > 1:
        found.append(("cross_node", [0, counts[0]]))
    return found


def _groups(slots: list[tuple[NodeView, int]], link: LinkClass) -> list[tuple[str, list[int]]]:
    """Groups to time: of 2, 4, 8 on the fullest node, of all there, one of each node, and of all."""
    counts = [count for _, count in slots]
    inside = max(counts)
    first = sum(counts[: counts.index(inside)])
    sizes = sorted({size for size in GROUPS if size < inside} | ({inside} if inside > 1 else set()))
    found: list[tuple[str, list[int]]] = [(link, list(range(first, first + size))) for size in sizes]
    if len(counts) > 1:
        found.append(("cross_node", [sum(counts[:index]) for index in range(len(counts))]))
    return found


def _rate(points: Sequence[MatmulPoint]) -> float:
    return max(point.flops_s for point in points)


def _middle(measured: Sequence[Sequence[MatmulPoint]]) -> list[MatmulPoint]:
    """Each point with the median rate of all workers that measured it."""
    rates: dict[tuple[str, int, int, int], list[float]] = {}
    for points in measured:
        for point in points:
            rates.setdefault((point.dtype, point.m, point.n, point.k), []).append(point.flops_s)
    return [
        MatmulPoint(dtype=dtype, m=m, n=n, k=k, flops_s=median(found))
        for (dtype, m, n, k), found in rates.items()
    ]


def _slowest(timed: Sequence[Sequence[CollectivePoint]]) -> list[CollectivePoint]:
    """Each collective with the seconds of its slowest rank."""
    found: dict[tuple[str, str, int, int], CollectivePoint] = {}
    for points in timed:
        for point in points:
            key = point.kind, point.link, point.ranks, point.size
            if key not in found or point.seconds > found[key].seconds:
                found[key] = point
    return list(found.values())


def peak_flops(name: str) -> float:
    """Dense bf16 operations per second of a card by its driver's name; 0: not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3") / 1e12
    989.0
    """
    for part, sheet in (
        ("A100", "a100-80g"),
        ("H100", "h100-80g"),
        ("H200", "h200-141g"),
        ("B200", "b200-180g"),
    ):
        if part in name:
            return DATA_SHEETS[sheet].flops
    return 0.0
