"""Exponential moving average of the weights, beside the moments: e ← d · e + (1 - d) · w after every update.

It begins as the weights themselves (`training_state`), so no bias needs correcting (averaging: Polyak &
Juditsky 1992; the exponential form: Tarvainen & Valpola 2017). It has the type of the master weights and
their boxes. Its update is elementwise: it sends nothing, and its values are the same at every layout.

To compute with it, the average and the weights change places, a tensor at a time: no second copy of the model
is made. Whoever reads live weights meanwhile would see the average, so snapshots must be written before. The
one buffer that this needs is there before anything moves: nothing can fail half-way for want of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from picotron_ray.parallel.local_shards import LocalParameter


class WeightAverage:
    """Average of one rank's trained weights.

    Args:
        decay: share of the old average that stays per update; None: there is no average.
        parameters: the trained ones of which this rank holds something.

    Fields:
        values: by the parameter's name, in its box; empty where there is none.
    """

    def __init__(self, decay: float | None, parameters: Sequence[LocalParameter]) -> None:
        self._decay = decay
        kept = parameters if decay is not None else ()
        self._weights: list[Tensor] = [parameter.local for parameter in kept]
        self.values = {parameter.spec.name: torch.zeros_like(parameter.local) for parameter in kept}
        self._averages = list(self.values.values())

    @torch.no_grad()
    def follow(self) -> None:
        """Take in weights that were just updated."""
        if self._decay is not None and self._averages:
            torch._foreach_lerp_(self._averages, self._weights, 1.0 - self._decay)

    @contextmanager
    def in_place(self, moved: Callable[[], None]) -> Iterator[None]:
        """Have the average where the weights are; they are back afterwards, bit for bit.

        Args:
            moved: called whenever weights have changed places.
        """
        largest = max(self._averages, key=torch.numel, default=torch.empty(0))
        buffer = largest.new_empty(largest.numel())
        self._exchange(buffer)
        try:
            moved()
            yield
        finally:
            self._exchange(buffer)
            moved()

    @torch.no_grad()
    def _exchange(self, buffer: Tensor) -> None:
        for average, weight in zip(self._averages, self._weights, strict=True):
            kept = buffer[: weight.numel()].view(weight.shape)
            kept.copy_(weight)
            weight.copy_(average)
            average.copy_(kept)
