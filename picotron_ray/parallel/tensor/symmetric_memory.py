"""Tensor-parallel overlap by torch's fused operators over symmetric memory (its async TP), called directly.

A rank reads the other ranks' parts out of their device memory while it multiplies
(``torch.distributed._symmetric_memory``). A compiler that should insert the operators may silently find
nothing to fuse (torchtitan#3869). Here they are called directly. Torch may still do something else, in two
cases:

- In its test mode it runs a collective and a product. `SymmetricOverlap` profiles a call of each operator
  when it is made, before the first step, and refuses where the fused loop did not run.
- Under multicast it gathers first and multiplies then, if tokens are few and lie along dimension 0. Here
  they lie along dimension 1.

The same calls fail where ranks do not reach each other's memory. Neither operator gathers an input for a
gradient of weights. A plain all-gather does, while the other product runs.

Symmetric memory belongs to one generation. torch keeps workspaces by the name of their group, so each
`SymmetricOverlap` has a name of its own, which `close` frees. Ranks find each other by keys that torch
numbers per process, not per group. `RenumberedStore` counts them from 0 in each generation, so that old and
new processes meet.

A product waits on the device, and nothing ends that wait. Where an abort finds a rank in a product, only the
end of its process does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from picotron_ray.comm import torch_groups
from picotron_ray.comm.sequence_collectives import GatherAhead
from picotron_ray.errors import LayoutError

FUSED = frozenset({"fused_all_gather_matmul", "fused_matmul_reduce_scatter"})
"""Names that torch records when the fused loops run."""
_EXCHANGE = re.compile(r"(.*SymmetricMemory/)(\d+)(.*)")
_numbers = count()


class RenumberedStore(Store):
    """Store that counts the exchanges of symmetric memory from its own first one."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self._first: dict[str, int] = {}

    def _key(self, key: str) -> str:
        found = _EXCHANGE.fullmatch(key)
        if found is None:
            return key
        before, number, after = found.groups()
        return f"{before}{int(number) - self._first.setdefault(before, int(number))}{after}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get([self._key(key) for key in keys])

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait([self._key(key) for key in keys], *timeout)


class SymmetricOverlap:
    """`Overlap` by fused operators; all ranks of the group make theirs together.

    Raises LayoutError where the operators do not run, or not fused.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:

        self._group, self._name = group, f"picotron-symmetric-{next(_numbers)}"
        # the store must outlive the group: torch asks the object in Python
        self._store = RenumberedStore(torch_groups.store_of(group))
        self._named = dist.ProcessGroup(self._store, group.rank(), group.size())
        kind = getattr(dist.ProcessGroup.BackendType, dist.get_backend(group).upper())
        self._named._register_backend(device, kind, group._get_backend(device))
        torch_groups.register(self._name, self._named)
        try:
            self._try(device)
        except BaseException:
            self.close()
            raise

    def _try(self, device: torch.device) -> None:
        parts, wrong = self._group.size(), "kernels.tp_overlap: saw symmetric-memory, but"
        x, factor = torch.zeros(2, 8, 16, device=device), torch.zeros(16, 16, device=device)
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                self.gather(x, [factor], keep=True)
                self.scatter([x.repeat(1, parts, 1)], [factor], None)[0]()
        except dist.DistError:
            raise
        except (RuntimeError, AssertionError) as error:
            said = (str(error) or type(error).__name__).splitlines()[0][:200]
            raise LayoutError(f"{wrong} torch cannot: {said}; use ring or none") from error
        missing = FUSED - {event.name for event in seen.events() or ()}
        if missing:
            raise LayoutError(f"{wrong} torch ran {' and '.join(sorted(missing))} unfused; use ring or none")

    def close(self) -> None:
        """Free the workspace and the name; the device must have finished all calls."""
        import torch.distributed._symmetric_memory as symmetric

        symmetric._group_name_to_workspace_tensor.pop(self._name, None)
        torch_groups.unregister(self._name)
        self._named = self._group = None  # type: ignore[assignment]

    def gather(self, x: Tensor, factors: Sequence[Tensor], keep: bool) -> tuple[list[Tensor], Tensor | None]:
        whole, found = torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), list(factors), 1, self._name, return_A=keep
        )
        return found, whole

    def scatter(
        self, xs: Sequence[Tensor], factors: Sequence[Tensor], gathered: Tensor | None
    ) -> tuple[Callable[[], Tensor], Tensor | None]:
        coming = None if gathered is None else GatherAhead(gathered, self._group)
        several = len(xs) > 1
        x, factor = (
            (torch.cat(list(xs), dim=-1), torch.cat(list(factors))) if several else (xs[0], factors[0])
        )
        total = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, factor, "sum", 1, self._name)
        return partial(_same, total), None if coming is None else coming.wait()


def _same(x: Tensor) -> Tensor:
    return x
