"""Ways of communication at one layout: ``comm`` of a config in the words of `comm`, and their candidates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from picotron_ray.comm.collectives.collectives import CollectivePlan, Collectives
from picotron_ray.comm.reducers.choose import ReductionPlan
from picotron_ray.comm.reducers.mesh_bounds import RANKS as MESH_RANKS
from picotron_ray.comm.wire_bytes import ACTIVATIONS, EXPERTS, GRADIENTS, PARAMETERS
from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.parallel.mesh import Mesh, axis_ranks, neighbours
from picotron_ray.train.gradients import Gradients
from picotron_ray.train.way_selection import Cost, Traveller, WaySelection

PURPOSES = {"parameters": PARAMETERS, "activations": ACTIVATIONS, "experts": EXPERTS}
"""Purpose of the collectives that a key of ``comm`` steers."""
GATHERS = ("flat", "ring", "mesh", "hierarchical")
EXCHANGES = ("flat", "pairwise", "hierarchical")


def reduction_plan(comm: CommConfig, mesh: Mesh) -> ReductionPlan:
    """Turn a config's section into a plan for the replicas of this rank."""
    inner = inner_ranks(comm, mesh, "data") if comm.gradients == "hierarchical" else 1
    return ReductionPlan(
        gradients=comm.gradients,
        topology=comm.topology,
        ratio=None if comm.ratio == "auto" else comm.ratio,
        bits=comm.bits,
        inner=inner,
        bucket_bytes=int(comm.bucket_mib * 2**20),
        chunk_bytes=int(comm.chunk_mib * 2**20),
        overlap=1.0 if comm.overlap_ratio == "auto" else comm.overlap_ratio,
    )


def collective_plans(comm: CommConfig) -> dict[str, CollectivePlan]:
    """Plans of gathers and exchanges, by purpose."""
    inner = None if comm.inner_ranks == "auto" else comm.inner_ranks
    chunk_bytes = int(comm.chunk_mib * 2**20)
    return {
        purpose: CollectivePlan(getattr(comm, key), inner, chunk_bytes) for key, purpose in PURPOSES.items()
    }


def reduction_candidates(
    plan: ReductionPlan, inner: int, ranks: int, *, own: bool = True
) -> dict[str, ReductionPlan]:
    """Exact plans to choose from, by name; two levels only where there are neighbourhoods of ``inner``.

    A mesh of many ranks is not even tried: one step of it would take as long as hundreds of others.

    Args:
        ranks: replicas that sum.
        own: whether own algorithms may replace the backend's (gloo's; NCCL chooses its own).
    """
    names = ("ring", "tree", *(("mesh",) if ranks <= MESH_RANKS else ())) if own else ()
    found = {
        "overlapped": replace(plan, gradients="overlapped"),
        "reduce-scatter": replace(plan, gradients="reduce-scatter"),
        **{name: replace(plan, gradients="bucketed", topology=name) for name in names},
    }
    return found | (
        {"hierarchical": replace(plan, gradients="hierarchical", inner=inner)} if inner > 1 else {}
    )


def axes_of(mesh: Mesh, overlap: bool = False) -> dict[str, str]:
    """The axis over which each thing travels at this layout, by name.

    Args:
        overlap: whether tensor parallelism's transfers hide behind products, which have no other way.
    """
    layout = mesh.layout
    shards = "shard" if layout.replicate > 1 else "data"
    found = {
        "gradients": "data" if layout.replicas > 1 else "",
        "parameters": shards if layout.zero and layout.replicas > 1 else "",
        "activations": "tp" if layout.tp > 1 and not overlap else "",
        "experts": "ep" if layout.ep > 1 else "",
    }
    return {thing: axis for thing, axis in found.items() if axis}


def inner_ranks(comm: CommConfig, mesh: Mesh, axis: str) -> int:
    """Ranks of a neighbourhood in every group of an axis; 1 where a group has not several equal ones.

    All ranks see all groups, and so choose among the same ways.
    """
    sizes = set()
    for ranks in _groups(mesh, axis):
        nodes = [mesh.nodes[rank] for rank in ranks] if mesh.nodes else []
        inner = neighbours(nodes) if comm.inner_ranks == "auto" else comm.inner_ranks
        fits = len(ranks) % inner == 0 and (axis == "data" or inner < len(ranks))
        sizes.add(inner if fits else 1)
    return sizes.pop() if len(sizes) == 1 else 1


def _groups(mesh: Mesh, axis: str) -> list[list[int]]:
    seen, found = set[int](), []
    for rank in range(mesh.layout.world_size):
        if rank not in seen:
            found.append(axis_ranks(mesh.layout, rank, axis))
            seen.update(found[-1])
    return found


def selection_of(
    comm: CommConfig,
    mesh: Mesh,
    gradients: Gradients,
    *,
    overlap: bool = False,
    own: bool = True,
    shown: bool = True,
) -> WaySelection:
    """Make the choice that goes on with the run; what a job has settled, or does not select, has one way.

    Args:
        overlap: see `axes_of`.
        own: whether own algorithms are candidates, as on gloo. On NCCL gradients without ZeRO alone have a
            choice, and times: the host sees none of the waits of the others.
        shown: whether figures are shown to anybody; CUDA events are recorded for them or for a choice.
    """
    things, timed = {}, own or (not mesh.layout.zero and (shown or comm.selector))
    gradients.time(timed)
    for thing, axis in axes_of(mesh, overlap).items():
        groups = _groups(mesh, axis)
        nodes = [{mesh.nodes[rank] for rank in ranks} for ranks in groups] if mesh.nodes else []
        link = "across nodes" if any(len(found) > 1 for found in nodes) else "in a node"
        inner = inner_ranks(comm, mesh, axis) if comm.selector else 1
        inner = inner if inner < len(groups[0]) else 1
        if thing == "gradients":
            found = _gradients(comm, mesh, gradients, inner, link, own)
            things[thing] = replace(found, timed=timed)
        else:
            collectives = mesh.collectives(PURPOSES[thing])
            things[thing] = _collectives(comm, collectives, thing, inner, link, own)
    return WaySelection(things, leads=mesh.rank == 0)


def _gradients(
    comm: CommConfig, mesh: Mesh, gradients: Gradients, inner: int, link: str, own: bool
) -> Traveller:
    fsdp = mesh.collectives(GRADIENTS)

    def cost() -> Cost:
        nbytes, seconds = gradients.cost
        return Cost(nbytes + fsdp.moved_bytes, seconds + fsdp.cost_s)

    ways: dict[str, Callable[[], None]] = {comm.gradients: lambda: None}
    if comm.selector and not mesh.layout.zero:
        plans = reduction_candidates(reduction_plan(comm, mesh), inner, mesh.layout.replicas, own=own)
        ways = {name: partial(gradients.use, plan) for name, plan in plans.items()}
    return Traveller(ways, cost, link, late=not own and len(ways) == 1)  # a choice is judged by its own step


def _collectives(
    comm: CommConfig, collectives: Collectives, thing: str, inner: int, link: str, own: bool
) -> Traveller:
    asked, plan = getattr(comm, thing), collectives.plan
    ways: Mapping[str, Callable[[], None]] = {asked: lambda: None}
    if comm.selector and own and asked == "auto":
        names = EXCHANGES if thing == "experts" else GATHERS
        ways = {
            name: partial(collectives.use, replace(plan, algorithm=name))
            for name in names
            if name != "hierarchical" or inner > 1
        }
    return Traveller(ways, lambda: Cost(collectives.moved_bytes, collectives.cost_s), link, timed=own)


def applied_ways(comm: CommConfig, mesh: Mesh) -> tuple[str, ...]:
    """Say how things but gradients travel, where a job asks for something."""
    found = []
    for thing, axis in axes_of(mesh).items():
        asked = "auto" if thing == "gradients" else getattr(comm, thing)
        if asked == "hierarchical":
            group = mesh.group(axis)
            assert group is not None
            inner = mesh.collectives(PURPOSES[thing]).inner(group)
            asked += f" in neighbourhoods of {inner}" if inner > 1 else ": one level, no neighbours"
        if asked != "auto":
            found.append(f"{thing} {asked}")
    return tuple(found)
