"""Meta-learning strategies: what a task adds to a step's loss, so that its gradient is the meta-gradient.

A model with weights θ adapts to a task by K inner steps on its support loss S::

    φ_0 = θ,    φ_i+1 = φ_i - α ∇S(φ_i)

With Q the loss of the query examples, a task's meta-gradient is

=========  ===========================================================================================
maml       ∇_θ Q(φ_K), through all inner steps (Finn et al. 2017, equation 1)
fomaml     ∇Q at φ_K: the same with ∇S taken as constant (there, section 5.2)
reptile    (θ - φ_K) / α (Nichol et al. 2018, algorithm 1; divided by α as section 2 has it for Adam)
metasgd    as maml for θ and for α, which has a value for every weight (Li et al. 2017, equation 2)
=========  ===========================================================================================

Losses are means over the examples' values: squared errors, or nats per token. Everything is functions of
`torch.func`. Tasks of a micro-batch are computed at once by ``vmap`` where that is right (`passes.is_chain`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

from picotron_ray.config.schema.meta import Strategy

Weights = Mapping[str, Tensor]


class Examples(NamedTuple):
    """Examples of a task: inputs and targets, each ``[examples, ...]``."""

    inputs: Tensor
    targets: Tensor


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean of a loss over all targets.

    Args:
        outputs: of the targets' shape where these are floats: squared errors. Else with a dimension of logits
            more: cross-entropy, nats.
    """
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@dataclass(frozen=True, slots=True)
class Learner:
    """A strategy for one model.

    Fields:
        model: called with the inputs of examples.
        rate: α, or where learned rates begin.
        steps: K.
    """

    model: nn.Module
    strategy: Strategy
    rate: float
    steps: int

    def loss(self, weights: Weights, examples: Examples) -> Tensor:
        """Return the mean loss of examples under given weights."""
        outputs = functional_call(self.model, dict(weights), (examples.inputs,))
        return mean_loss(outputs, examples.targets)

    def adapted(self, weights: Weights, shifts: Weights, support: Examples) -> Weights:
        """Return the weights after the inner steps.

        Args:
            shifts: what the rate of each weight is above `rate`; empty: nothing.
        """
        step: Callable[..., dict[str, Tensor]] = grad(self.loss)
        first_order = self.strategy in ("fomaml", "reptile")
        for _ in range(self.steps):
            slopes = step(dict(weights), support)
            if first_order:
                slopes = {name: slope.detach() for name, slope in slopes.items()}
            weights = {
                name: w - (self.rate + shifts.get(name, 0.0)) * slopes[name] for name, w in weights.items()
            }
        return weights

    def objective(
        self, weights: Weights, shifts: Weights, support: Examples, query: Examples
    ) -> tuple[Tensor, Tensor]:
        """Return what a task adds to a step: its gradient is the meta-gradient, and the task's loss Q(φ_K).

        They are one number but for reptile, whose gradient is that of no loss.
        """
        adapted = self.adapted(weights, shifts, support)
        loss = self.loss(adapted, query)
        if self.strategy != "reptile":
            return loss, loss
        ways = [(w - adapted[name]).detach() / self.rate for name, w in weights.items()]
        pairs = zip(weights.values(), ways, strict=True)
        return torch.stack([(w * way).sum() for w, way in pairs]).sum(), loss
