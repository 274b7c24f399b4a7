"""Sum of gradients by their projection on few directions (PowerSGD, Vogels et al. 2019).

Each matrix M ``[a, b]`` is sent as P ``[a, r]`` and Q ``[b, r]``: P = M Q, summed and made orthonormal,
then Q = M^T P, summed. The result is P Q^T, the sum's projection on the columns of P. A rank's error is the
rest of its own matrix. The next step begins with this Q, the first one with random numbers of the step and
the tensor's place. Tensors that are smaller than their factors travel whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.reducers.feedback import Feedback
from picotron_ray.comm.reducers.reducer import Reduction
from picotron_ray.comm.wire_bytes import GRADIENTS, SENT, ring_share


def rank_for(rows: int, columns: int, ratio: float) -> int:
    """Rank of the factors that take ``ratio`` of a matrix's bytes, at least 1; 0: the matrix is smaller.

    >>> rank_for(128, 128, 0.5), rank_for(128, 1, 0.5)
    (32, 0)
    """
    rank = max(1, int(ratio * rows * columns / (rows + columns)))
    return rank if rank * (rows + columns) < rows * columns else 0


class PowerSGD:
    """Reducer of matrices. The sum of P travels beside the backward pass, that of Q after it."""

    overlaps = True
    exact = False

    def __init__(self, group: dist.ProcessGroup, ratio: float) -> None:
        self._group, self._ratio = group, ratio

    def start(
        self, flat: Tensor, shapes: Sequence[torch.Size], feedback: Feedback | None, step: int
    ) -> Reduction:
        """Project on random directions, and start to sum the projections."""
        assert feedback is not None, "what is left out must be kept"
        feedback.add_to_(flat)
        pieces = zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True)
        views = [piece.view(_two_dims(shape)) for piece, shape in pieces]
        ranks = [rank_for(view.size(0), view.size(1), self._ratio) for view in views]
        return _Projection(flat, views, ranks, feedback, self._group, step)


class _Projection:
    def __init__(
        self,
        flat: Tensor,
        views: Sequence[Tensor],
        ranks: Sequence[int],
        feedback: Feedback,
        group: dist.ProcessGroup,
        step: int,
    ) -> None:
        self._flat, self._feedback, self._group = flat, feedback, group
        self._cut = [(view, rank) for view, rank in zip(views, ranks, strict=True) if rank]
        self._whole = [view for view, rank in zip(views, ranks, strict=True) if not rank]
        known = feedback.directions or [
            _directions(view.size(1), rank, step * 1_000_003 + number, view)
            for number, (view, rank) in enumerate(self._cut)
        ]
        left = [view @ q for (view, _), q in zip(self._cut, known, strict=True)]
        self._left = _Packed([*left, *self._whole], group)

    def wait(self) -> None:
        """Sum the other factors, and put the matrices together."""
        found = self._left.wait()
        left = [torch.linalg.qr(matrix).Q for matrix in found[: len(self._cut)]]
        right = [view.T @ p for (view, _), p in zip(self._cut, left, strict=True)]
        error = torch.zeros_like(self._flat)
        for (view, _), p, q in zip(self._cut, left, right, strict=True):
            _same_place(error, view, self._flat).copy_(view).addmm_(p, q.T, alpha=-1.0)
        sums = _Packed(right, self._group).wait() if right else []
        self._feedback.directions = sums
        for (view, _), p, q in zip(self._cut, left, sums, strict=True):
            torch.mm(p, q.T, out=view)
        for view, total in zip(self._whole, found[len(self._cut) :], strict=True):
            view.copy_(total)
        self._feedback.keep(error)


class _Packed:
    """Sum of some tensors in one collective."""

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._buffer = torch.cat([tensor.reshape(-1) for tensor in tensors])
        nbytes = self._buffer.numel() * self._buffer.element_size()
        SENT.add(GRADIENTS, 2 * ring_share(nbytes, group.size()))
        self._work = dist.all_reduce(self._buffer, group=group, async_op=True)

    def wait(self) -> list[Tensor]:
        """The sums, in the tensors' shapes."""
        assert self._work is not None
        self._work.wait()
        pieces = self._buffer.split([shape.numel() for shape in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]


def _two_dims(shape: torch.Size) -> tuple[int, int]:
    return (shape.numel() // shape[-1], shape[-1]) if len(shape) > 1 else (shape.numel(), 1)


def _directions(rows: int, rank: int, seed: int, like: Tensor) -> Tensor:
    """Normal numbers ``[rows, rank]``, drawn on the CPU: the same on every device."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=source).to(device=like.device, dtype=like.dtype)


def _same_place(other: Tensor, view: Tensor, flat: Tensor) -> Tensor:
    """View of ``other`` where ``view`` lies in ``flat``."""
    start = view.storage_offset() - flat.storage_offset()
    return other[start : start + view.numel()].view(view.shape)
