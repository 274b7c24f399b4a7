"""Memory pools: explicit, long-lived allocations apart from what comes and goes (torch.cuda.MemPool).

Gradient buckets and optimizer state live as long as a generation. In segments of their own they leave no
holes between activations when the next generation makes others. A pool is filled by one block of the expected
size, which is freed at once: the allocator keeps its segment for the pool. So a pool that does not fit fails
when a generation begins, and its size is in the message.

A pool takes the allocations of the thread that entered it, and not those of autograd's threads. Activations
and temporaries are thus accounted (`parallel.memory.trace`), not pooled. CPUs have no pools: there all of
this does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

POOLED = ("gradient", "optimizer")
"""Classes of memory that are allocated explicitly."""


class MemoryPools:
    """Pools of one generation.

    Args:
        device: None: there are no pools.
        expected: bytes of each class to fill its pool with.

    Raises:
        torch.OutOfMemoryError: a pool does not fit; the message says which.

    Fields:
        applied: what was made, one phrase.
    """

    def __init__(
        self, device: torch.device | None = None, expected: Mapping[str, float] | None = None
    ) -> None:
        self._device = device
        self._pools: dict[str, torch.cuda.MemPool] = {}
        self.applied: tuple[str, ...] = ()
        if device is None:
            return
        sizes = {kind: int((expected or {}).get(kind, 0)) for kind in POOLED}
        for kind, nbytes in sizes.items():
            self._pools[kind] = torch.cuda.MemPool()
            self._fill(kind, nbytes)
        told = ", ".join(f"{kind} {nbytes / 1e6:,.0f} MB" for kind, nbytes in sizes.items())
        self.applied = (f"memory pools: {told}",)

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Let this thread allocate from the pool of a class; from anywhere where there is none."""
        pool = self._pools.get(kind)
        if pool is None:
            yield
            return
        with torch.cuda.use_mem_pool(pool, self._device):
            yield

    def _fill(self, kind: str, nbytes: int) -> None:
        if nbytes <= 0:
            return
        try:
            with self.of(kind):
                torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self._device)
            raise torch.OutOfMemoryError(
                f"memory.preallocate: saw {free / 1e9:.3g} GB free of {total / 1e9:.3g} GB, expected"
                f" {nbytes / 1e9:.3g} GB for the class {kind}"
            ) from error

    def close(self) -> None:
        """Drop the pools: their memory goes back once nothing lies in it."""
        self._pools.clear()
