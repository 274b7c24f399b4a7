"""AdamW and SGD over local tensors, with eager moments.

The optimizers of torch.optim create their state at the first step, keep a step counter per parameter and
speak DTensor. Here the moments exist from the start (snapshots list them), hold no counter (the step
number is the engine's), and are plain tensors in the boxes of their parameters. Weight decay is decoupled
(Loshchilov & Hutter 2019) for both, and not applied to norms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from picotron_ray.config.job import OptimizerConfig
from picotron_ray.parallel.parallelize import LocalParameter

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Updates the parameters of one rank in place.

    Fields:
        moments: per moment name, one tensor per parameter, in the same order (none for sgd).
    """

    def __init__(self, config: OptimizerConfig, parameters: Sequence[LocalParameter]) -> None:
        self.config = config
        self._parameters = list(parameters)
        self._locals = [parameter.local for parameter in parameters]
        names = MOMENTS if config.name == "adamw" else ()
        self.moments = {name: [torch.zeros_like(tensor) for tensor in self._locals] for name in names}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rate: float, step: int) -> None:
        """One update. ``step`` is its number, from 1: the bias correction's exponent."""
        for decay in (True, False):
            chosen = [i for i, p in enumerate(self._parameters) if p.spec.decay is decay]
            if chosen:
                self._update(chosen, gradients, rate, step, self.config.weight_decay if decay else 0.0)

    def _update(
        self, chosen: Sequence[int], gradients: Sequence[Tensor], rate: float, step: int, decay: float
    ) -> None:
        weights = [self._locals[i] for i in chosen]
        slopes = [gradients[i] for i in chosen]
        if self.config.name == "sgd":
            torch._foreach_mul_(weights, 1.0 - rate * decay)
            torch._foreach_add_(weights, slopes, alpha=-rate)
            return
        averages, squares = ([self.moments[name][i] for i in chosen] for name in MOMENTS)
        adamw(
            weights,
            slopes,
            averages,
            squares,
            [],
            # torch counts the step up by one before using it, in each of these
            [torch.full((), step - 1, dtype=torch.float32, device=w.device) for w in weights],
            fused=True,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=rate,
            weight_decay=decay,
            eps=self.config.eps,
            maximize=False,
        )
