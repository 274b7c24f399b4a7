"""Ring overlap: tensor-parallel products while parts travel round a ring, on any backend.

With n ranks each operation has n products of 1/n of the tokens and n - 1 transfers. Each transfer is under
way during one product (Wang et al. 2023). In a gather, a rank multiplies the part that it has and passes it
on. In a reduce-scatter, the sum for one rank's tokens travels through all other ranks to that rank. Each rank
adds its share, which it computes while the sum is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.sequence_collectives import Shift


class RingOverlap:
    """`Overlap` by sends and receives round a ring."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._ranks, self._mine = group, group.size(), group.rank()

    def _parts(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's ``x`` with that rank's index, own first. The next one travels while one is in use."""
        held = x
        for step in range(self._ranks):
            coming = Shift(held, self._group) if step < self._ranks - 1 else None
            yield (self._mine - step) % self._ranks, held
            if coming is not None:
                held = coming.wait()

    def gather(self, x: Tensor, factors: Sequence[Tensor], keep: bool) -> tuple[list[Tensor], Tensor | None]:
        parts: dict[int, Tensor] = {}
        found: dict[int, list[Tensor]] = {}
        for source, part in self._parts(x):
            flat = part.flatten(0, 1)
            found[source] = [(flat @ factor).unflatten(0, part.shape[:2]) for factor in factors]
            if keep:
                parts[source] = part
        ordered = [found[source] for source in range(self._ranks)]
        results = [torch.cat(column, dim=1) for column in zip(*ordered, strict=True)]
        return results, self._whole(parts) if keep else None

    def _whole(self, parts: dict[int, Tensor]) -> Tensor:
        return torch.cat([parts[source] for source in range(self._ranks)], dim=1)

    def scatter(
        self, xs: Sequence[Tensor], factors: Sequence[Tensor], gathered: Tensor | None
    ) -> tuple[Callable[[], Tensor], Tensor | None]:
        others = None if gathered is None else self._parts(gathered)
        parts: dict[int, Tensor] = {}
        so_far: Callable[[], Tensor] | None = None
        for step in range(self._ranks):
            if others is not None:
                source, part = next(others)
                parts[source] = part
            # pass on the sum for the tokens of the rank that is one step further back each time
            carried = None if so_far is None else Shift(so_far(), self._group, tag=1)
            share = self._share(xs, factors, (self._mine - 1 - step) % self._ranks)
            so_far = partial(_added, carried, share)
        assert so_far is not None
        return so_far, self._whole(parts) if others is not None else None

    def _share(self, xs: Sequence[Tensor], factors: Sequence[Tensor], target: int) -> Tensor:
        """This rank's share of the sum for one rank's tokens, ``[batch, seq / n, out]``."""
        length = xs[0].size(1) // self._ranks
        rows = [x.narrow(1, target * length, length) for x in xs]
        first, *others = (row.flatten(0, 1) for row in rows)
        share = first @ factors[0]
        for row, factor in zip(others, factors[1:], strict=True):
            share.addmm_(row, factor)
        return share.unflatten(0, rows[0].shape[:2])


def _added(coming: Shift | None, share: Tensor) -> Tensor:
    """Add a share into the received sum; the share may be a product that selective recomputation keeps."""
    return share if coming is None else coming.wait().add_(share)
