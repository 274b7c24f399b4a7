"""AdamW, SGD and Muon over local tensors, with eager moments.

The optimizers of torch.optim create their state at the first step, keep a step counter per parameter and
speak DTensor. Here the moments exist from the start (snapshots list them), hold no counter (the step
number is the engine's), and are plain tensors in the boxes of their parameters. Weight decay is decoupled
(Loshchilov & Hutter 2019) for all, and not applied to norms and biases. Muon takes the matrices inside
blocks and leaves everything else to AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from picotron_ray.config.job import JobConfig
from picotron_ray.config.layout import Layout
from picotron_ray.config.optimizer import OptimizerConfig
from picotron_ray.models.plan import ParameterSpec
from picotron_ray.parallel.matrices import share_out
from picotron_ray.parallel.parallelize import LocalParameter
from picotron_ray.train.muon import Muon
from picotron_ray.train.offload import MOMENTS, Alike, OffloadedAdamW
from picotron_ray.train.precision import orthogonalisation_dtype

MOMENTUM = "momentum"  # Muon's


def decays(spec: ParameterSpec, config: OptimizerConfig) -> bool:
    """Whether weight decay applies to a parameter."""
    return spec.decay and (config.decay_embeddings or not spec.embedding)


def build_optimizer(
    job: JobConfig,
    parameters: Sequence[LocalParameter],
    table: Sequence[ParameterSpec],
    layout: Layout,
    rank: int,
    device: torch.device,
) -> Optimizer:
    """The optimizer that a job asks for.

    Args:
        parameters: the trained ones of which this rank holds something.
        table: all parameters of this rank's pipeline stages, in one order on all ranks of them.
    """
    config = job.optimizer
    fused = job.kernels.optimizer == "fused"
    if config.name != "muon":
        threads = max(1, int(job.cluster.cpus_per_worker))
        host = (device, threads) if config.offload else None
        return Optimizer(config, parameters, fused=fused, host=host)
    rounds = share_out([spec for spec in table if spec.matrix], layout, rank)
    mine = [parameter for parameter in parameters if parameter.spec.matrix]
    dtype = orthogonalisation_dtype(job, device)
    muon = Muon(mine, rounds, rank, config.momentum, dtype, device)
    return Optimizer(config, parameters, muon, fused=fused)


class Optimizer:
    """Updates the parameters of one rank in place.

    Args:
        muon: what updates the matrices; None: they are like all others.
        fused: whether AdamW is one kernel of torch's; else a few operations, each over all tensors (foreach).
        host: the device, and threads of the host, where AdamW's moments are kept off the device.

    Fields:
        moments: per moment name, a tensor by the name of each parameter that has it (none for sgd).
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameters: Sequence[LocalParameter],
        muon: Muon | None = None,
        *,
        fused: bool = True,
        host: tuple[torch.device, int] | None = None,
    ) -> None:
        self.config, self._muon, self._fused = config, muon, fused
        self._names = [parameter.spec.name for parameter in parameters]
        self._locals = [parameter.local for parameter in parameters]
        others = [i for i, p in enumerate(parameters) if muon is None or p.spec.name not in muon.momentum]
        self._groups = [
            (chosen, config.weight_decay if decay else 0.0)
            for decay in (True, False)
            if (chosen := [i for i in others if decays(parameters[i].spec, config) is decay])
        ]
        self._offloaded = None
        if host is not None:
            self._offloaded = OffloadedAdamW(config, [self._alike(*group) for group in self._groups], *host)
            self.moments = self._offloaded.moments
            return
        names = () if config.name == "sgd" else MOMENTS
        self.moments = {
            name: {self._names[i]: torch.zeros_like(self._locals[i]) for i in others} for name in names
        }
        if muon is not None:
            self.moments[MOMENTUM] = muon.momentum

    def _alike(self, chosen: Sequence[int], decay: float) -> Alike:
        return Alike([self._names[i] for i in chosen], [self._locals[i] for i in chosen], chosen, decay)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rate: float, step: int) -> None:
        """One update. ``step`` is its number, from 1: the bias correction's exponent.

        Under Muon all ranks of a pipeline stage together; RuntimeError when one of them is gone.
        """
        if self._offloaded is not None:
            self._offloaded.step(gradients, rate, step)
            return
        for chosen, decay in self._groups:
            self._update(chosen, gradients, rate, step, decay)
        if self._muon is not None:
            named = zip(self._names, gradients, strict=True)
            mine = {name: gradient for name, gradient in named if name in self._muon.momentum}
            self._muon.step(mine, rate, self.config.weight_decay)

    def _update(
        self, chosen: Sequence[int], gradients: Sequence[Tensor], rate: float, step: int, decay: float
    ) -> None:
        weights = [self._locals[i] for i in chosen]
        slopes = [gradients[i] for i in chosen]
        if self.config.name == "sgd":
            torch._foreach_mul_(weights, 1.0 - rate * decay)
            torch._foreach_add_(weights, slopes, alpha=-rate)
            return
        averages, squares = ([self.moments[name][self._names[i]] for i in chosen] for name in MOMENTS)
        adamw(
            weights,
            slopes,
            averages,
            squares,
            [],
            self._steps(weights, step),
            fused=self._fused,
            foreach=not self._fused,
            amsgrad=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=rate,
            weight_decay=decay,
            eps=self.config.eps,
            maximize=False,
        )

    def _steps(self, weights: Sequence[Tensor], step: int) -> list[Tensor]:
        """A counter per tensor, which torch counts up by one before using it.

        The fused kernel reads it on the device, foreach on the host: else it would wait for the device.
        """
        devices = (w.device if self._fused else torch.device("cpu") for w in weights)
        return [torch.full((), step - 1, dtype=torch.float32, device=device) for device in devices]
