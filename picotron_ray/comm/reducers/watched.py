"""Sum that is watched: nobody may write into a buffer between the start of its sum and the end.

What travels is a copy. So the buffer itself stays as it was when the sum began, unless somebody writes into
it, and its hashes tell. The result is that of the values of the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from picotron_ray.comm.reducers.feedback import Feedback
from picotron_ray.comm.reducers.reducer import Reducer, Reduction

Hash = Callable[[Tensor], Tensor]
"""Returns a number for a tensor's bits, on its device."""
Written = Callable[[Sequence[int]], None]
"""Hears which of a buffer's tensors were written into while it was summed."""


@dataclass(slots=True)
class SumWatch:
    """Watch over sums.

    Fields:
        hash: of a tensor.
        written: called at the end of each sum whose buffer has changed.
    """

    hash: Hash
    written: Written

    def start(
        self,
        reducer: Reducer,
        flat: Tensor,
        shapes: Sequence[torch.Size],
        feedback: Feedback | None,
        step: int,
    ) -> Reduction:
        """Start the sum of ``flat`` as `Reducer.start` does."""
        parts = flat.split([shape.numel() for shape in shapes])
        before = torch.stack([self.hash(part) for part in parts])
        travels = flat.clone()
        return WatchedSum(self, parts, before, flat, travels, reducer.start(travels, shapes, feedback, step))


@dataclass(slots=True)
class WatchedSum:
    """Sum under way whose buffer is watched."""

    watch: SumWatch
    parts: Sequence[Tensor]
    before: Tensor
    flat: Tensor
    travels: Tensor
    work: Reduction

    def wait(self) -> None:
        """Wait for the sum, tell who wrote meanwhile, and put it into the buffer."""
        self.work.wait()
        after = torch.stack([self.watch.hash(part) for part in self.parts])
        changed = torch.nonzero(after != self.before).view(-1).tolist()
        if changed:
            self.watch.written(changed)
        self.flat.copy_(self.travels)
