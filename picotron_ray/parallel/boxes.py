"""Which box of each canonical parameter a rank holds: tensor parallelism cuts first, then FSDP.

Both follow ``torch.chunk``: chunks of ceil(size / parts), the last ones shorter or empty. FSDP cuts
dimension 0 of what tensor parallelism left, over the replicas of data and context parallelism.
"""

from __future__ import annotations

from picotron_ray.checkpoint.canonical import Box
from picotron_ray.config.layout import Layout
from picotron_ray.models.plan import ParameterSpec


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of chunk ``index`` of ``size`` elements, as torch.chunk cuts them."""
    step = -(-size // parts)
    start = min(size, index * step)
    return start, min(size, start + step) - start


def local_box(spec: ParameterSpec, layout: Layout, rank: int) -> Box:
    """The box of one parameter that ``rank`` holds; empty where the cut leaves it nothing."""
    at = layout.coordinates(rank)
    offset, size = [0] * len(spec.shape), list(spec.shape)
    if spec.tp_dim is not None and layout.tp > 1:
        offset[spec.tp_dim], size[spec.tp_dim] = chunk(spec.shape[spec.tp_dim], layout.tp, at.tp)
    if layout.zero and layout.replicas > 1:
        start, size[0] = chunk(size[0], layout.replicas, layout.replica(rank))
        offset[0] += start
    return Box(tuple(offset), tuple(size))


def is_primary(spec: ParameterSpec, layout: Layout, rank: int) -> bool:
    """Whether this rank's state group speaks for the box: tp rank 0 does for what tp replicates."""
    return spec.tp_dim is not None or layout.coordinates(rank).tp == 0


def counts_in_norm(spec: ParameterSpec, layout: Layout, rank: int) -> bool:
    """Whether this rank adds its box to a global sum: exactly one rank of the world does for each box."""
    replicated = layout.zero == 0
    return is_primary(spec, layout, rank) and not (replicated and layout.replica(rank))
