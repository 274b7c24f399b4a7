"""Muon: orthogonalized momentum (Jordan et al. 2024), distributed over the ranks that hold a matrix.

Momentum lives in the boxes of its parameter like any other moment. In each step and round (`assign_owners`) a
matrix's direction goes to its owner, which makes it whole and orthogonalizes it. The result goes back to
every rank that holds part of the matrix. That is two exchanges, whatever the number of matrices. Messages
have the type in which the iteration runs.

A peer that dies meanwhile leaves this rank's state half updated. The loop marks its heartbeat page before the
optimizer writes, and recovery goes on from snapshots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from picotron_ray.comm.p2p import exchange
from picotron_ray.layout.shards import Box, region
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.train.optim.matrix_exchange import Matrix, Route, routes

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST_NORM = 1e-7
UPDATE_RMS = 0.2
"""Root mean square of AdamW's updates, about. Muon's are scaled to it (Liu et al. 2025)."""


def newton_schulz(matrices: Tensor) -> Tensor:
    """Bring the singular values of ``[n, rows, columns]`` near 1, and keep the singular vectors.

    Five steps of the quintic x → a x + (b x xᵀ + c (x xᵀ)²) x on the matrix over its Frobenius norm; its
    coefficients are chosen for a steep start and leave values at about 0.7 to 1.2 (Jordan et al. 2024).
    """
    a, b, c = COEFFICIENTS
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(SMALLEST_NORM)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon:
    """Updates the matrices of one rank in place.

    Args:
        parameters: those of which this rank holds something.
        rounds: the matrices and their owners (`matrix_exchange.assign_owners`).
        rank: this rank.
        momentum: decay of the momentum.
        dtype: type of the messages and of the iteration.
        device: of the parameters.

    Fields:
        momentum: by the parameter's name, in its box.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        rounds: Sequence[Sequence[Matrix]],
        rank: int,
        momentum: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._parameters = {parameter.spec.name: parameter for parameter in parameters}
        self._rounds = [(matrices, *routes(matrices, rank)) for matrices in rounds]
        self._rank, self._decay = rank, momentum
        self._like = torch.empty(0, dtype=dtype, device=device)
        self.momentum = {name: torch.zeros_like(p.local) for name, p in self._parameters.items()}

    def step(
        self, gradients: Mapping[str, Tensor], rates: Mapping[str, float], decays: Mapping[str, float]
    ) -> None:
        """Update once, all ranks of a pipeline stage together.

        Args:
            gradients, rates, decays: gradient, learning rate and weight decay by the parameter's name.

        w ← (1 - rate · decay) w - rate · 0.2 · sqrt(max(rows, columns)) · direction, so that learning rate
        and decay of AdamW carry over (Liu et al. 2025). The direction is Nesterov's: orthogonal((1 - µ) g +
        µ m), after m ← µ m + (1 - µ) g.
        """
        weights = {name: parameter.local for name, parameter in self._parameters.items()}
        for name, gradient in gradients.items():
            self.momentum[name].lerp_(gradient, 1.0 - self._decay)
        for name, weight in weights.items():
            weight.mul_(1.0 - rates[name] * decays[name])
        for matrices, there, back in self._rounds:
            found = self._orthogonal(matrices, self._gather(matrices, there, gradients))
            for matrix, box, update in self._give_back(matrices, back, found):
                scale = UPDATE_RMS * math.sqrt(max(matrix.shape))
                self._part(weights, matrix.name, box).add_(update, alpha=-rates[matrix.name] * scale)

    def _part(self, tensors: Mapping[str, Tensor], name: str, box: Box) -> Tensor:
        """Return the part of this rank's tensor of a parameter that a box covers, as a view."""
        for held, rows in self._parameters[name].parts(tensors[name]):
            if held.intersect(box) == box:
                found: Tensor = rows[region(box, held)]
                return found
        raise AssertionError(f"{name}: this rank does not hold {box}")

    def _gather(
        self, matrices: Sequence[Matrix], route: Route, gradients: Mapping[str, Tensor]
    ) -> dict[int, Tensor]:
        """Gather the directions of a round's matrices that this rank owns: ``[rows, columns]`` by index."""

        def direction(name: str, box: Box) -> Tensor:
            return self._part(gradients, name, box).lerp(self._part(self.momentum, name, box), self._decay)

        outgoing = {
            peer: [direction(matrices[number].name, box) for number, box in boxes]
            for peer, boxes in route.outgoing.items()
        }
        whole = {n: self._like.new_empty(m.box.size) for n, m in enumerate(matrices) if m.owner == self._rank}
        for number, box, values in self._exchange(outgoing, route):
            whole[number][region(box, matrices[number].box)] = values
        return {number: values.view(matrices[number].shape) for number, values in whole.items()}

    def _orthogonal(self, matrices: Sequence[Matrix], whole: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Apply `newton_schulz` to each, to those of one shape at once."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for number in whole:
            by_shape.setdefault(matrices[number].shape, []).append(number)
        found: dict[int, Tensor] = {}
        for numbers in by_shape.values():
            found |= zip(numbers, newton_schulz(torch.stack([whole[n] for n in numbers])), strict=True)
        return found

    def _give_back(
        self, matrices: Sequence[Matrix], route: Route, found: Mapping[int, Tensor]
    ) -> Iterator[tuple[Matrix, Box, Tensor]]:
        """Send the owners' results to the holders; yield (matrix, box, values) of this rank."""

        def part(number: int, box: Box) -> Tensor:
            of = matrices[number].box
            return found[number].view(of.size)[region(box, of)]

        outgoing = {peer: [part(*what) for what in boxes] for peer, boxes in route.outgoing.items()}
        for number, box, values in self._exchange(outgoing, route):
            yield matrices[number], box, values

    def _exchange(
        self, outgoing: Mapping[int, Sequence[Tensor]], route: Route
    ) -> Iterator[tuple[int, Box, Tensor]]:
        """Exchange messages; yield (index of the matrix, box, values of the box's shape) that arrive."""
        counts = {peer: sum(box.numel for _, box in boxes) for peer, boxes in route.incoming.items()}
        for peer, flat in exchange(outgoing, counts, self._rank, self._like).items():
            parts = flat.split([box.numel for _, box in route.incoming[peer]])
            for (number, box), values in zip(route.incoming[peer], parts, strict=True):
                yield number, box, values.view(box.size)
