"""Sums over the ranks of a group: of one tensor, or of many in flat buckets.

One collective serves a bucket instead of one tensor, because each call costs time whatever its size.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.collectives.assigned import assigned, count_all_reduce

BUCKET_BYTES = 32 * 2**20
THREAD_WAIT_S = 300.0
"""Limit of a thread's wait for the others of its group."""


class ThreadGroup:
    """Ranks that are threads of this process, to try a plan on without starting processes."""

    def __init__(self, index: int, barrier: threading.Barrier, slots: list[Tensor]) -> None:
        self._index, self._barrier, self._slots = index, barrier, slots

    @classmethod
    def make(cls, size: int) -> list[ThreadGroup]:
        """The groups of ``size`` threads, one each."""
        barrier, slots = threading.Barrier(size, timeout=THREAD_WAIT_S), [torch.Tensor()] * size
        return [cls(index, barrier, slots) for index in range(size)]

    def size(self) -> int:
        return len(self._slots)

    def rank(self) -> int:
        return self._index

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the threads; raises BrokenBarrierError where one of them has left."""
        self._slots[self._index] = x
        self._barrier.wait()
        total = torch.stack(self._slots).sum(dim=0)
        self._barrier.wait()
        return total

    def leave(self) -> None:
        """Release the others, which wait for this thread in vain."""
        self._barrier.abort()


Group = dist.ProcessGroup | ThreadGroup


def all_sum(x: Tensor, group: Group) -> Tensor:
    """The sum of ``x`` over the ranks of a group, a new tensor on each of them."""
    if isinstance(group, ThreadGroup):
        return group.sum(x)
    total = x.clone(memory_format=torch.contiguous_format)
    own = assigned(group)
    if own is None:
        dist.all_reduce(total, group=group)
    else:
        own.all_reduce_(total, group)
    return total


def buckets(tensors: Sequence[Tensor], limit_bytes: int) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, up to ``limit_bytes`` together (or one that is larger)."""
    current: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if current and (filled + nbytes > limit_bytes or tensor.dtype != current[0].dtype):
            yield current
            current, filled = [], 0
        current.append(tensor)
        filled += nbytes
    if current:
        yield current


def sum_(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """All-reduce the tensors in place: each becomes its sum over ``group``.

    All ranks pass tensors of the same shapes in the same order. The next bucket is packed while the one
    before it is on the wire.
    """
    pending: list[tuple[list[Tensor], Tensor, dist.Work]] = []
    for bucket in buckets(tensors, bucket_bytes):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        count_all_reduce(group, flat)
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        pending.append((bucket, flat, work))
    for bucket, flat, work in pending:
        work.wait()
        pieces = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [p.view(t.shape) for p, t in zip(pieces, bucket, strict=True)])
