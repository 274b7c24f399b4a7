"""Split of a state group between the replicas of one node, for their snapshots. Pure; torch-free.

Replicas of one state group on one node hold the same tensors; each copies a share into its own slot.
The primary tensors are laid end to end in canonical order and the byte range is cut evenly, at whole
rows of the first dimension, so that shares differ by at most one row and a member touches at most two
tensors partly. Every replica computes the same cut from the same inputs: no message is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from picotron_ray.layout.shards import Box, Shard


class Splittable(Protocol):
    """State tensor: its shard, its live storage (sliceable by rows), and whether it counts."""

    @property
    def shard(self) -> Shard: ...
    @property
    def tensor(self) -> Any: ...
    @property
    def primary(self) -> bool: ...


T = TypeVar("T", bound=Splittable)


def split_for_replica(tensors: Sequence[T], index: int, count: int) -> list[T]:
    """Take the tensors, or rows of tensors, that member ``index`` of ``count`` replicas copies.

    The shares of all members are disjoint and together are exactly the primary tensors.
    """
    wanted = sorted(
        (t for t in tensors if t.primary and t.shard.box.numel),
        key=lambda t: (t.shard.name, t.shard.box.offset),
    )
    total = sum(t.shard.nbytes for t in wanted)
    low, high = total * index // count, total * (index + 1) // count
    mine: list[T] = []
    at = 0
    for tensor in wanted:
        first, last = (_row(tensor.shard, at, cut) for cut in (low, high))
        if last > first:
            mine.append(_rows(tensor, first, last))
        at += tensor.shard.nbytes
    return mine


def shared_tensors(tensors: Sequence[T], shares: Sequence[int], count: int) -> list[T]:
    """Take the tensors, or rows of tensors, of several replicas' shares; of all of them, the primary ones."""
    if len(shares) == count:
        return [tensor for tensor in tensors if tensor.primary]
    return [tensor for index in shares for tensor in split_for_replica(tensors, index, count)]


def state_bytes(tensors: Sequence[T]) -> int:
    """Bytes of the primary tensors."""
    return sum(tensor.shard.nbytes for tensor in tensors if tensor.primary)


def _rows_of(shard: Shard) -> int:
    return shard.box.size[0] if shard.box.size else 1


def _row(shard: Shard, start: int, cut: int) -> int:
    """The row of a tensor that begins at byte ``start`` where the cut at byte ``cut`` falls."""
    row_bytes = shard.nbytes // _rows_of(shard)
    return min(max(-(-(cut - start) // row_bytes), 0), _rows_of(shard))


def _rows(tensor: T, first: int, last: int) -> T:
    shard = tensor.shard
    if (first, last) == (0, _rows_of(shard)):
        return tensor
    box = Box((shard.box.offset[0] + first, *shard.box.offset[1:]), (last - first, *shard.box.size[1:]))
    change: Any = replace  # T is a dataclass, which no protocol can say
    cut: T = change(tensor, shard=replace(shard, box=box), tensor=tensor.tensor[first:last])
    return cut
