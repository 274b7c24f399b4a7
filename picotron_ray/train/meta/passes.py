"""Passes of a step that learns from tasks: the backward pass of each micro-batch gives meta-gradients.

A backward pass leaves them where any other leaves gradients, so that their sums over replicas, the norm, the
update and all that follows are as in ordinary training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from picotron_ray.data.batch import StepBatch
from picotron_ray.train.meta.strategies import Examples, Learner
from picotron_ray.train.meta.task_batches import TaskBatcher

OnPhase = Callable[[str], None]


Losses = Callable[[StepBatch], Iterator[Tensor]]


class Forward(Protocol):
    """Passes that give losses alone."""

    def losses(self, batch: StepBatch) -> Iterator[Tensor]:
        """Yield loss sums."""
        ...


def losses_of(passes: Forward, adapted: bool) -> Losses:
    """Return what gives held-out losses: of tasks after adaptation, or before it."""
    return passes.losses if adapted or not isinstance(passes, MetaPasses) else passes.losses_before


class MetaPasses:
    """Meta-gradients of one micro-batch of tasks after the other.

    Args:
        shifts: learned parts of inner rates, by the weight's name; empty: there are none.
    """

    def __init__(self, learner: Learner, batcher: TaskBatcher, shifts: Mapping[str, nn.Parameter]) -> None:
        self.learner, self._batcher, self._shifts = learner, batcher, shifts
        self.applied: tuple[str, ...] = (f"{learner.strategy}: tasks of {learner.steps} inner steps",)

    def run(self, batch: StepBatch, scale: float, on_phase: OnPhase) -> Tensor:
        """Add the meta-gradients of all tasks, times ``scale`` and the values of a query set.

        Returns:
            Sum of the losses after adaptation over all values of query sets.
        """
        losses, values = [], self._batcher.shape.values
        for number, (support, query, weights) in enumerate(self._batcher.micro_batches(batch)):
            if number:
                on_phase("forward")
            aims, after = of_tasks(self.learner, self.learner.objective, self._shifts, support, query)
            on_phase("backward")
            ((aims * weights).sum() * (values * scale)).backward()
            losses.append((after.detach() * weights).sum() * values)
        return torch.stack(losses).sum()

    def losses(self, batch: StepBatch) -> Iterator[Tensor]:
        """Yield sums of losses after adaptation, one per micro-batch."""
        yield from self._losses(batch, lambda *args: self.learner.objective(*args)[1])

    def losses_before(self, batch: StepBatch) -> Iterator[Tensor]:
        """Yield sums of losses of the query sets before adaptation."""
        yield from self._losses(batch, lambda weights, shifts, support, query: self.learner.loss(weights, query))

    def _losses(self, batch: StepBatch, loss: Callable[..., Tensor]) -> Iterator[Tensor]:
        for support, query, weights in self._batcher.micro_batches(batch):
            found = of_tasks(self.learner, loss, self._shifts, support, query)
            yield (found * weights).sum() * self._batcher.shape.values

    def watch(self, on_action: Callable[[str, int], None]) -> None:
        """Do nothing: there are no stages."""

    def close(self) -> None:
        """Drop the model."""
        del self.learner


def of_tasks(
    learner: Learner,
    function: Callable[..., Any],
    shifts: Mapping[str, Tensor],
    support: Examples,
    query: Examples,
) -> Any:
    """Compute a function of trained weights, shifts and a task for all tasks, with attention by its formulas.

    Args:
        shifts: learned parts of inner rates, by the weight's name.
        support, query: ``[tasks, examples, ...]``.
    """
    named = learner.model.named_parameters()
    weights = {name: parameter for name, parameter in named if parameter.requires_grad}
    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        return vmap(function, in_dims=(None, None, 0, 0))(weights, dict(shifts), support, query)
