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


CHAINED = (nn.Linear, nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Identity)
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
        yield from self._losses(batch, lambda *args: self.learner.objective(*args)[1:])

    def losses_before(self, batch: StepBatch) -> Iterator[Tensor]:
        """Yield sums of losses of the query sets before adaptation."""
        yield from self._losses(batch, lambda weights, _, __, query: (self.learner.loss(weights, query),))

    def _losses(self, batch: StepBatch, loss: Callable[..., tuple[Tensor]]) -> Iterator[Tensor]:
        for support, query, weights in self._batcher.micro_batches(batch):
            (found,) = of_tasks(self.learner, loss, self._shifts, support, query)
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
) -> tuple[Tensor, ...]:
    """Compute a function of trained weights, shifts and a task for all tasks, with attention by its formulas.

    Args:
        function: gives scalars; see `Learner.objective`.
        shifts: learned parts of inner rates, by the weight's name.
        support, query: ``[tasks, examples, ...]``.

    Returns:
        Each scalar for all tasks, ``[tasks]``.
    """
    named = learner.model.named_parameters()
    weights = {name: parameter for name, parameter in named if parameter.requires_grad}
    given = dict(shifts)
    with sdpa_kernel(SDPBackend.MATH):  # others have no second derivative
        if is_chain(learner.model):
            found: tuple[Tensor, ...] = vmap(function, in_dims=(None, None, 0, 0))(
                weights, given, support, query
            )
            return found
        each = [function(weights, given, *task) for task in zip(_tasks(support), _tasks(query), strict=True)]
    return tuple(torch.stack(values) for values in zip(*each, strict=True))


def _tasks(examples: Examples) -> Iterator[Examples]:
    """Yield the examples of each task."""
    for inputs, targets in zip(examples.inputs, examples.targets, strict=True):
        yield Examples(inputs, targets)


def is_chain(model: nn.Module) -> bool:
    """Whether a model is a chain of linear layers and functions of single values.

    Of these ``vmap`` gives the right second derivatives. Of layers that keep statistics for their backward
    pass it does not: torch's rule for a layer norm's takes mean and variance as constants.
    """
    return type(model) is nn.Sequential and all(type(part) in CHAINED for part in model)
