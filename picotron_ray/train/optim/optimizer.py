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

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.train.optim.adamw import AdamW, QuantizedAdamW
from picotron_ray.train.optim.adamw_offload import MOMENTS, OffloadedAdamW, ParameterGroup
from picotron_ray.train.optim.matrix_exchange import assign_owners
from picotron_ray.train.optim.muon import Muon
from picotron_ray.train.optim.quantized_state import QuantizedTensor
from picotron_ray.train.precision.precision import orthogonalisation_dtype

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
    rounds = assign_owners([spec for spec in table if spec.matrix], layout, rank)
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
        moments: per moment name, by the name of each parameter that has it (none for sgd), a tensor, or what
            keeps it in 8 bits.
        applied: what became of the moments that is not plain, one phrase each.
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
        self.config, self._muon = config, muon
        self._names = [parameter.spec.name for parameter in parameters]
        self._locals = [parameter.local for parameter in parameters]
        others = [i for i, p in enumerate(parameters) if muon is None or p.spec.name not in muon.momentum]
        self._groups = [
            self._group(chosen, config.weight_decay if decay else 0.0)
            for decay in (True, False)
            if (chosen := [i for i in others if decays(parameters[i].spec, config) is decay])
        ]
        self._adamw: AdamW | QuantizedAdamW | OffloadedAdamW | None = None
        if host is not None:
            self._adamw = OffloadedAdamW(config, self._groups, *host)
        elif config.moments == "8bit":
            self._adamw = QuantizedAdamW(config, self._groups, fused)
        elif config.name != "sgd":
            self._adamw = AdamW(config, self._groups, fused)
        self.moments: dict[str, dict[str, Tensor | QuantizedTensor]] = {}
        if self._adamw is not None:
            self.moments |= {moment: dict(kept) for moment, kept in self._adamw.moments.items()}
        if muon is not None:
            self.moments[MOMENTUM] = dict(muon.momentum)
        self.applied = self._applied()

    def _applied(self) -> tuple[str, ...]:
        if self.config.moments != "8bit":
            return ()
        kept = self.moments[MOMENTS[0]].values()
        count = sum(isinstance(moment, QuantizedTensor) for moment in kept)
        return (f"moments of {count} of {len(kept)} tensors in 8 bits",)

    def _group(self, chosen: Sequence[int], decay: float) -> ParameterGroup:
        return ParameterGroup(
            [self._names[i] for i in chosen], [self._locals[i] for i in chosen], chosen, decay
        )

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rate: float, step: int) -> None:
        """One update. ``step`` is its number, from 1: the bias correction's exponent.

        Under Muon all ranks of a pipeline stage together; RuntimeError when one of them is gone.
        """
        if self._adamw is not None:
            self._adamw.step(gradients, rate, step)
        else:
            for group in self._groups:
                torch._foreach_mul_(group.weights, 1.0 - rate * group.decay)
                torch._foreach_add_(group.weights, [gradients[i] for i in group.indices], alpha=-rate)
        if self._muon is not None:
            named = zip(self._names, gradients, strict=True)
            mine = {name: gradient for name, gradient in named if name in self._muon.momentum}
            self._muon.step(mine, rate, self.config.weight_decay)
