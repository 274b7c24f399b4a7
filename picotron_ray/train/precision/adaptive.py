"""Adaptive precision: the parts of a model that may compute in low precision, by measurement, under a bound.

A generation begins with these steps, on the weights that it starts from:

1. The held-out loss is measured with all parts in fp32, then with each part alone in low precision. The worst
   relative error over several batches is the part's sensitivity.
2. A part's error counts for more where its gradients varied in training (`gradient_variability`).
3. Parts are lowered in the order of least error per parameter, while the sum of their errors keeps the bound.
   To first order, errors of single parts add up at most.
4. The error of all chosen parts together is measured. The most sensitive ones return to fp32 until that error
   keeps the bound too.

Losses are summed over all ranks, and margins are the maximum over all ranks. So every rank decides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.config.schema.compute import AdaptivePrecisionConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.data.grad_norm import part_norms
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.parallel.precision.switches import PrecisionSwitches
from picotron_ray.train.precision.gradient_variability import GradientVariability, part_of_each

LossWith = Callable[[frozenset[str]], Sequence[float]]
"""The losses of several batches with those parts in low precision, the others in full."""


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """The decision of one generation.

    Fields:
        low: the parts that compute in low precision.
        error: their relative error of the loss, together, the worst of the batches.
        sensitivity: of every part alone.
        margins: the factor by which each part's error was taken for larger, by its gradients in training.
    """

    low: frozenset[str]
    error: float
    sensitivity: Mapping[str, float]
    margins: Mapping[str, float]


def parts_of(table: Iterable[ParameterSpec]) -> dict[str, int]:
    """List the parts that are decided about, with their numbers of parameters.

    A part is a module that holds matrices, embeddings aside. A part within another, such as a mixture's
    shared expert, belongs to the outer one.
    """
    found: dict[str, int] = {}
    for spec in table:
        if len(spec.shape) > 1 and not spec.embedding:
            path = spec.name.split(".")
            part = ".".join(path[:-2]) or path[0]
            found[part] = found.get(part, 0) + spec.numel
    outer = {part: next(x for x in sorted(found) if f"{part}.".startswith(f"{x}.")) for part in found}
    return {part: sum(found[x] for x in found if outer[x] == part) for part in found if outer[part] == part}


def choose(
    parts: Mapping[str, int], loss_with: LossWith, bound: float, margins: Mapping[str, float] | None = None
) -> PrecisionPolicy:
    """Choose the parts that compute in low precision, so that the loss errs by at most ``bound`` of itself.

    Args:
        margins: factors of the parts' errors, at least 1; None: all 1.
    """
    margins = dict.fromkeys(parts, 1.0) if margins is None else margins
    exact = loss_with(frozenset())

    def error_of(low: Collection[str]) -> float:
        found = loss_with(frozenset(low))
        return max(abs(a / b - 1.0) for a, b in zip(found, exact, strict=True))

    errors = {part: error_of([part]) for part in parts}
    revised = {part: errors[part] * margins[part] for part in parts}
    low: list[str] = []
    spent = 0.0
    for part in sorted(parts, key=lambda part: revised[part] / parts[part]):
        if spent + revised[part] <= bound:
            low.append(part)
            spent += revised[part]
    low.sort(key=lambda part: revised[part])
    error = error_of(low) if low else 0.0
    while low and not error * _margin(low, errors, revised) <= bound:
        low.pop()
        error = error_of(low) if low else 0.0
    return PrecisionPolicy(frozenset(low), error, errors, margins)


def _margin(low: Sequence[str], errors: Mapping[str, float], revised: Mapping[str, float]) -> float:
    """Return the factor by which several parts' joint error counts, from the factors of each."""
    total = sum(errors[part] for part in low)
    return sum(revised[part] for part in low) / total if total > 0.0 else 1.0


class Adaptation(Protocol):
    """The part of a step that decides in which precision the model's parts compute."""

    def observe(self, gradients: Sequence[Tensor]) -> None:
        """Look at a step's gradients, reduced and not clipped; all ranks together."""

    def step(self) -> None:
        """Hear that the gradients that were observed last have moved the weights."""

    def decide(
        self, batches: Sequence[StepBatch], loss_sum: Callable[[Sequence[StepBatch]], float]
    ) -> PrecisionPolicy | None:
        """Choose the parts from the weights as they are; None where the job's precision holds for all."""
        ...


class FixedPrecision:
    """The job's precision for every part."""

    def observe(self, gradients: Sequence[Tensor]) -> None:
        """Look at nothing."""

    def step(self) -> None:
        """Keep nothing."""

    def decide(
        self, batches: Sequence[StepBatch], loss_sum: Callable[[Sequence[StepBatch]], float]
    ) -> PrecisionPolicy | None:
        """Decide nothing."""
        return None


class AdaptivePrecision:
    """Decides about the switches of a model's parts, and follows their gradients meanwhile.

    Args:
        sizes: the parts and their numbers of parameters (`parts_of`).
        switches: of this rank's parts.
        parameters: the trained ones of this rank, whose gradients `observe` is given.
        variability: of the gradients that this process has seen in training.
    """

    def __init__(
        self,
        config: AdaptivePrecisionConfig,
        sizes: Mapping[str, int],
        switches: PrecisionSwitches,
        parameters: Sequence[LocalParameter],
        layout: Layout,
        device: torch.device,
        variability: GradientVariability,
    ) -> None:
        self._config, self._layout, self._device, self._variability = config, layout, device, variability
        self._sizes, self._switches = sizes, switches
        self._counted = [parameter.counted for parameter in parameters]
        self._part = part_of_each((p.spec.name for p in parameters), list(self._sizes))
        self._norms: list[float] = []

    def observe(self, gradients: Sequence[Tensor]) -> None:
        """Look at a step's gradients, reduced and not clipped; all ranks together."""
        count = len(self._sizes)
        self._norms = part_norms(gradients, self._counted, self._part, count, self._layout, self._device)

    def step(self) -> None:
        """Count the gradients that were observed last: they have moved the weights."""
        self._variability.observe(self._norms)

    def decide(
        self, batches: Sequence[StepBatch], loss_sum: Callable[[Sequence[StepBatch]], float]
    ) -> PrecisionPolicy:
        """Choose the parts from the weights as they are, and set them; all ranks together.

        Args:
            batches: this rank's part of held-out batches, of which ``adaptive_precision.batches`` are used.
            loss_sum: this rank's part of their loss.
        """
        assert self._config.error_bound is not None
        used = batches[: self._config.batches]

        def losses(low: frozenset[str]) -> list[float]:
            self.set(low)
            return self._over_ranks([loss_sum([batch]) for batch in used], dist.ReduceOp.SUM)

        margins = self._over_ranks(self._variability.margins(len(self._sizes)), dist.ReduceOp.MAX)
        found = choose(
            self._sizes, losses, self._config.error_bound, dict(zip(self._sizes, margins, strict=True))
        )
        self.set(found.low)
        return found

    def set(self, low: Collection[str]) -> None:
        """Let these parts compute in low precision from now on, the others in full."""
        self._switches.set(low)

    def _over_ranks(self, numbers: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        values = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if self._layout.world_size > 1:
            dist.all_reduce(values, op=how)
        found: list[float] = values.tolist()
        return found


def choose_adaptation(
    config: AdaptivePrecisionConfig,
    sizes: Mapping[str, int],
    switches: PrecisionSwitches,
    parameters: Sequence[LocalParameter],
    layout: Layout,
    device: torch.device,
    variability: GradientVariability,
) -> Adaptation:
    """Return what a job asks for: `AdaptivePrecision` under an error bound, else `FixedPrecision`."""
    if config.error_bound is None:
        return FixedPrecision()
    return AdaptivePrecision(config, sizes, switches, parameters, layout, device, variability)
