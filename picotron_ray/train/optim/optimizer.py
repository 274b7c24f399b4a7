"""AdamW, SGD and Muon over local tensors, with eager moments.

The optimizers of torch.optim create their state at the first step, keep a step counter per parameter and
speak DTensor. Here the moments exist from the start, so that snapshots can list them. They hold no counter:
the step number is the engine's. They are plain tensors in the boxes of their parameters.

Weight decay is decoupled for all (Loshchilov & Hutter 2019), and not applied to norms and biases. Muon takes
the matrices inside blocks and leaves everything else to AdamW. A group of the config (``optimizer.groups``)
gives what its pattern matches another rate and decay; names are the same at every layout, and so are groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from picotron_ray.checkpoint.torch_state import WEIGHT_AVERAGE
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.config.support.parameter_groups import group_of
from picotron_ray.layout.layout import Layout
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.train.optim.adamw import AdamW, QuantizedAdamW
from picotron_ray.train.optim.adamw_offload import MOMENTS, OffloadedAdamW, ParameterGroup
from picotron_ray.train.optim.matrix_exchange import assign_owners
from picotron_ray.train.optim.muon import Muon
from picotron_ray.train.optim.quantized_state import QuantizedTensor
from picotron_ray.train.optim.sgd import SGD
from picotron_ray.train.optim.weight_average import WeightAverage
from picotron_ray.train.precision.precision import orthogonalization_dtype


class UpdateRule(Protocol):
    """Updates some of a rank's parameters in place.

    Fields:
        moments: per moment name, a tensor by the name of each parameter, or its values in 8 bits.
    """

    @property
    def moments(self) -> Mapping[str, Mapping[str, Tensor | QuantizedTensor]]:
        """Live storage of the moments."""
        ...

    def step(self, gradients: Sequence[Tensor], rate: float, step: int) -> None:
        """Update once; ``gradients`` are those of all parameters of the rank."""


def decays(spec: ParameterSpec, config: OptimizerConfig) -> bool:
    """Return whether weight decay applies to a parameter."""
    return spec.decay and (config.decay_embeddings or not spec.embedding)


def pace(spec: ParameterSpec, config: OptimizerConfig) -> tuple[float, float]:
    """Return a parameter's factor of the learning rate, and its weight decay."""
    decay = config.weight_decay if decays(spec, config) else 0.0
    group = group_of(config, spec.name)
    if group is None:
        return 1.0, decay
    return group.rate_factor, decay if group.weight_decay is None else group.weight_decay


def build_optimizer(
    job: JobConfig,
    parameters: Sequence[LocalParameter],
    table: Sequence[ParameterSpec],
    layout: Layout,
    rank: int,
    device: torch.device,
) -> Optimizer:
    """Build the optimizer that a job asks for.

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
    dtype = orthogonalization_dtype(job, device)
    muon = Muon(mine, rounds, rank, config.momentum, dtype, device)
    return Optimizer(config, parameters, muon, fused=fused)


class Optimizer:
    """Updates the parameters of one rank in place, by one rule for matrices and one for the others.

    Args:
        muon: the rule of the matrices. None: theirs is that of all others.
        fused: whether AdamW is one kernel of torch's; else a few operations, each over all tensors (foreach).
        host: the device, and threads of the host, where AdamW's moments are kept off the device.

    Fields:
        average: the moving average of the weights, if the config asks for one.
        moments: per moment name, by the name of each parameter that has it (none for sgd), a tensor, or its
            values in 8 bits; the average is among them.
        applied: what is not plain about the moments, one phrase each.
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
        of_muon = set() if muon is None else set(muon.momentum)
        others = [i for i, p in enumerate(parameters) if p.spec.name not in of_muon]
        groups = _groups(parameters, others, config)
        self._rules: list[UpdateRule] = [_rule(config, groups, fused, host)]
        if muon is not None:
            self._rules.append(_MuonRule(muon, [parameter.spec for parameter in parameters], config))
        self.moments: dict[str, dict[str, Tensor | QuantizedTensor]] = {
            moment: dict(kept) for rule in self._rules for moment, kept in rule.moments.items()
        }
        self.average = WeightAverage(config.ema_decay, parameters)
        if self.average.values:
            self.moments[WEIGHT_AVERAGE] = dict(self.average.values)
        self.applied = tuple(self._applied(config))

    def _applied(self, config: OptimizerConfig) -> Iterator[str]:
        if config.moments == "8bit":
            kept = self.moments[MOMENTS[0]].values()
            count = sum(isinstance(moment, QuantizedTensor) for moment in kept)
            yield f"moments of {count} of {len(kept)} tensors in 8 bits"
        if config.groups:
            yield f"{len(config.groups)} parameter groups"
        if config.ema_decay is not None:
            yield f"moving average of the weights, decay {config.ema_decay:g}"

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], rate: float, step: int) -> None:
        """Update once; under Muon all ranks of a pipeline stage together.

        Args:
            step: the update's number, from 1: the bias correction's exponent.

        Raises:
            RuntimeError: under Muon, one of the ranks is gone.
        """
        for rule in self._rules:
            rule.step(gradients, rate, step)
        self.average.follow()


def _groups(
    parameters: Sequence[LocalParameter], chosen: Sequence[int], config: OptimizerConfig
) -> list[ParameterGroup]:
    """Sort parameters by factor of the learning rate and weight decay."""
    alike: dict[tuple[float, float], list[int]] = {}
    for i in chosen:
        alike.setdefault(pace(parameters[i].spec, config), []).append(i)
    return [
        ParameterGroup(
            [parameters[i].spec.name for i in which],
            [parameters[i].local for i in which],
            which,
            decay,
            factor,
        )
        for (factor, decay), which in alike.items()
    ]


def _rule(
    config: OptimizerConfig,
    groups: Sequence[ParameterGroup],
    fused: bool,
    host: tuple[torch.device, int] | None,
) -> UpdateRule:
    if host is not None:
        return OffloadedAdamW(config, groups, *host)
    if config.moments == "8bit":
        return QuantizedAdamW(config, groups, fused)
    return SGD(groups) if config.name == "sgd" else AdamW(config, groups, fused)


class _MuonRule:
    """Muon by the names of its parameters.

    Args:
        specs: all parameters of the rank, in the order of their gradients.
    """

    def __init__(self, muon: Muon, specs: Sequence[ParameterSpec], config: OptimizerConfig) -> None:
        self._muon = muon
        self._mine = [(i, spec.name) for i, spec in enumerate(specs) if spec.name in muon.momentum]
        paces = {spec.name: pace(spec, config) for spec in specs}
        self._factors = {name: paces[name][0] for _, name in self._mine}
        self._decays = {name: paces[name][1] for _, name in self._mine}
        self.moments: dict[str, dict[str, Tensor]] = {"momentum": muon.momentum}

    def step(self, gradients: Sequence[Tensor], rate: float, step: int) -> None:
        """Update the matrices once."""
        rates = {name: rate * factor for name, factor in self._factors.items()}
        self._muon.step({name: gradients[i] for i, name in self._mine}, rates, self._decays)
