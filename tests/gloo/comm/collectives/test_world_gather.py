"""Numbers of all ranks by way of their nodes are those of a flat gather, in the same order."""

from __future__ import annotations

import pytest
import torch

from picotron_ray.comm.collectives import world_gather
from picotron_ray.comm.collectives.world_gather import gather_world, world_rounds
from picotron_ray.comm.renamed import all_gather_single
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel import mesh as module
from picotron_ray.parallel.mesh import make_mesh
from tests.support.gloo.faults import replace
from tests.support.gloo.pool import Job, Pool


def gathered(job: Job, nodes: tuple[str, ...], many: int) -> tuple[list[float], list[float], int, list[str]]:
    """By `gather_world` and flat; rounds, and uses of communicators."""
    undo, groups = replace(module, "MANY_RANKS", many), job.groups()
    groups.connect()
    try:
        with groups.forming():
            mesh = make_mesh(Layout(dp=2, tp=len(nodes) // 2), job.rank, "cpu", nodes=nodes)
        part = torch.tensor([[job.rank, 10 + job.rank]], dtype=torch.float64)
        found, flat = (torch.zeros(2 * len(nodes), dtype=torch.float64) for _ in range(2))
        gather_world(found, part)
        all_gather_single(flat, part.view(-1))
        seen = found.tolist(), flat.tolist(), world_rounds(len(nodes)), list(mesh.communicators)
        mesh.close()
        assert not world_gather._ASSIGNED, "a mesh takes its groups along"
        return seen
    finally:
        undo()
        groups.close()


@pytest.mark.parametrize(
    ("nodes", "many", "rounds"),
    [
        (("a", "a", "b", "b"), 4, 2),
        (("a", "a", "b", "b"), 5, 3),
        (("a", "a", "a", "a"), 4, 3),
        (("a", "b", "b", "b"), 4, 3),
    ],
    ids=["two levels", "few ranks", "one node", "uneven nodes"],
)
def test_gather_by_nodes_is_a_gather(pool: Pool, nodes: tuple[str, ...], many: int, rounds: int) -> None:
    for found, flat, seen, uses in pool.run(4, gathered, nodes, many):
        assert found == flat == [number for rank in range(4) for number in (rank, 10 + rank)]
        assert seen == rounds
        assert ("node" in uses) == ("nodes" in uses) == (rounds == 2)
