"""Interface of all reducers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from picotron_ray.comm.reducers.feedback import Feedback


class Reduction(Protocol):
    """Sum under way."""

    def wait(self) -> None:
        """Return once the buffer holds the sum, the same bits on every rank; RuntimeError: a peer is gone."""


class Reducer(Protocol):
    """Sums a buffer over the ranks of a group, in place.

    Fields:
        overlaps: whether `start` returns while messages travel, so that it pays to call it during backward.
        exact: whether the result is the sum, but for rounding.
    """

    overlaps: bool
    exact: bool

    def start(
        self, flat: Tensor, shapes: Sequence[torch.Size], feedback: Feedback | None, step: int
    ) -> Reduction:
        """Start to sum ``flat`` ``[n]``; every rank calls it in the same order.

        Args:
            shapes: of the tensors that lie in ``flat``, end to end.
            feedback: of this buffer; None for exact reducers.
            step: number of the training step, the same on all ranks.
        """
        ...


class Done:
    """Sum that was finished when it was started."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Deferred:
    """Sum of several rounds of messages, which begins when it is waited for."""

    def __init__(self, flat: Tensor, reduce: Reduce) -> None:
        self._flat, self._reduce = flat, reduce

    def wait(self) -> None:
        """Run the rounds."""
        self._reduce(self._flat)


class Reduce(Protocol):
    """Sums a buffer in place."""

    def __call__(self, flat: Tensor, /) -> None: ...
