"""Boxes of canonical parameters that ranks hold, and which state groups checkpoint them. Torch-free.

Tensor parallelism cuts first, then FSDP. Both follow ``torch.chunk``: chunks of ceil(size / parts), the last
ones shorter or empty. FSDP cuts dimension 0 of the boxes of tensor and expert parallelism, over the ranks
that hold the same box; of experts that do not divide, another (`zero_dim`).
"""

from __future__ import annotations

from picotron_ray.layout.expert_order import boxes_in_order
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box
from picotron_ray.models.parameters import ParameterSpec


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return offset and length of chunk ``index`` of ``size`` elements, as torch.chunk cuts them."""
    step = -(-size // parts)
    start = min(size, index * step)
    return start, min(size, start + step) - start


def zero_dim(spec: ParameterSpec, layout: Layout) -> int:
    """Return the dimension along which ZeRO cuts a parameter: 0, but for experts that do not divide.

    FSDP pads dimension 0. One expert over 8 ranks would be all of it on one of them, and 8 times as much in
    every gather and reduction. So a stack whose experts do not divide is cut within them, along the first
    dimension that divides evenly, which FSDP wants of others than the first.
    """
    if not (spec.expert and spec.sharded and layout.zero):
        return 0
    shards, here = layout.expert_shards, -(-spec.shape[0] // layout.ep)
    if here % shards == 0:
        return 0
    parts = [shards * (layout.tp if dim == spec.tp_dim else 1) for dim in range(len(spec.shape))]
    even = (dim for dim, size in enumerate(spec.shape) if dim and size % parts[dim] == 0)
    return next(even, 0)


def local_box(spec: ParameterSpec, layout: Layout, rank: int) -> Box:
    """Return the box of one parameter that ``rank`` holds; it may be empty.

    A stack of experts is meant as the layout orders it. `local_boxes` says which experts these are.
    """
    at = layout.coordinates(rank)
    offset, size = [0] * len(spec.shape), list(spec.shape)
    if spec.tp_dim is not None and layout.tp > 1:
        offset[spec.tp_dim], size[spec.tp_dim] = chunk(spec.shape[spec.tp_dim], layout.tp, at.tp)
    shards, shard = layout.shards, layout.shard(rank)
    if spec.expert:
        offset[0], size[0] = chunk(spec.shape[0], layout.ep, layout.expert_index(rank))
        shards, shard = layout.expert_shards, layout.expert_shard(rank)
    if layout.zero and spec.sharded:
        dim = zero_dim(spec, layout)
        start, size[dim] = chunk(size[dim], shards, shard)
        offset[dim] += start
    return Box(tuple(offset), tuple(size))


def local_boxes(spec: ParameterSpec, layout: Layout, rank: int) -> tuple[Box, ...]:
    """Return the boxes of one canonical parameter that ``rank`` holds, in the order of its local rows.

    There are several where experts are placed by load, else one.
    """
    box = local_box(spec, layout, rank)
    return boxes_in_order(box, layout.experts_of(spec.layer)) if spec.expert and layout.ep > 1 else (box,)


def replica_key(spec: ParameterSpec, layout: Layout, rank: int) -> tuple[int, ...]:
    """Name the box that ``rank`` holds: of one parameter, ranks with equal keys hold the same box.

    It depends on what cuts the parameter, and not on its shape. So few keys stand for all parameters of a
    rank: pipeline rank, tensor-parallel rank, index of its experts and of its part under ZeRO; -1 where that
    does not cut.
    """
    at = layout.coordinates(rank)
    tp = at.tp if spec.tp_dim is not None and layout.tp > 1 else -1
    experts = layout.expert_index(rank) if spec.expert and layout.ep > 1 else -1
    cut = layout.zero and spec.sharded
    part = (layout.expert_shard(rank) if spec.expert else layout.shard(rank)) if cut else -1
    return at.pp, tp, experts, part


def is_primary(spec: ParameterSpec, layout: Layout, rank: int) -> bool:
    """Return whether this rank's state group is the one that checkpoints the box.

    Several groups may hold the same box. Then the first of them checkpoints it. There are four such cases:
    parameters that tensor parallelism replicates, parameters outside of experts under expert parallelism,
    parameters that ZeRO leaves whole, and a tied embedding (the first stage's group).
    """
    if spec.copy:
        return False
    if spec.tp_dim is None and layout.coordinates(rank).tp:
        return False
    if layout.zero:
        return spec.sharded or layout.shard(rank) == 0
    return spec.expert or layout.expert_index(rank) == 0


def counts_in_norm(spec: ParameterSpec, layout: Layout, rank: int) -> bool:
    """Return whether this rank adds its box to a global sum: exactly one rank per box does."""
    if not spec.trained or not is_primary(spec, layout, rank):
        return False
    if layout.zero:
        return layout.replica(rank) < layout.shards  # the first copy
    return layout.expert_replica(rank) == 0
