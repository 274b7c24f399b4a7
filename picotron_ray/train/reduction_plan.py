"""Plan of the sums of gradients at one layout: ``comm`` of a config in the words of `comm.reducers`."""

from __future__ import annotations

from picotron_ray.comm.reducers.choose import ReductionPlan
from picotron_ray.config.schema.comm import CommConfig
from picotron_ray.parallel.mesh import Mesh, axis_ranks, neighbours
from picotron_ray.train.reducer_selection import ReducerSelection


def reduction_plan(comm: CommConfig, mesh: Mesh) -> ReductionPlan:
    """Turn a config's section into a plan for the replicas of this rank."""
    inner = _inner(comm, mesh) if comm.gradients == "hierarchical" else 1
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


def selection_of(comm: CommConfig, mesh: Mesh) -> ReducerSelection | None:
    """Make the choice that goes on with the run, where a job asks for it."""
    if not comm.selector or mesh.layout.zero or mesh.layout.replicas == 1:
        return None
    inner = _inner(comm, mesh)
    return ReducerSelection(reduction_plan(comm, mesh), inner if inner < mesh.layout.replicas else 1, mesh)


def _inner(comm: CommConfig, mesh: Mesh) -> int:
    """Replicas of a neighbourhood; 1 where the replicas make no equal ones."""
    if comm.inner_ranks == "auto":
        ranks = axis_ranks(mesh.layout, mesh.rank, "data")
        return neighbours([mesh.nodes[rank] for rank in ranks] if mesh.nodes else [])
    return comm.inner_ranks if mesh.layout.replicas % comm.inner_ranks == 0 else 1
