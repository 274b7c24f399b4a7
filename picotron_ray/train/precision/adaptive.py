"""Adaptive precision: the parts of a model that may compute in low precision, by measurement, under a bound.

A generation begins with these steps, on the weights that it starts from:

1. One forward and backward pass of each held-out batch, all parts in fp32, gives the exact loss and, to first
   order, the error that low precision in each part would add (`sensitivity`). The worst batch counts.
2. A part's error counts for more where its gradients varied in training (`gradient_variability`).
3. Parts are lowered in the order of least error per parameter, while the sum of their errors keeps the bound.
4. The error of all chosen parts together is measured, by forward passes. While it breaks the bound, the most
   sensitive return to fp32, as many as by that measure must; after ``MEASURES`` all do.

So the number of passes is the same whatever the number of parts: at most 1 + ``MEASURES`` forward passes and
1 backward pass of each batch.

Beside that, parts that become unstable while they train rise to fp32 and fall back later (`stability`).

Losses and errors are summed over all ranks, and margins are the maximum over all ranks. So every rank decides
alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from picotron_ray.checkpoint.torch_state import StateTensor
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout
from picotron_ray.models.parameters import ParameterSpec
from picotron_ray.parallel.data.grad_norm import PartSums
from picotron_ray.parallel.local_shards import LocalParameter
from picotron_ray.parallel.precision.switches import PrecisionSwitches
from picotron_ray.train.late_numbers import LateNumbers
from picotron_ray.train.precision.gradient_variability import GradientVariability, part_of_each
from picotron_ray.train.precision.loss_scaler import Scaling
from picotron_ray.train.precision.sensitivity import RoundingErrors, error_of
from picotron_ray.train.precision.stability import (
    COUNTED_EVERY,
    GradientFigures,
    StabilityWatch,
    count_elements,
    figures_of,
)

MEASURES = 4
"""Times that a choice is measured, at most."""
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""By the job's precision, the type of parts in low precision."""
ErrorOf = Callable[[frozenset[str]], float]
"""Relative error of the loss with those parts in low precision, the others in full, the worst batch's."""


class MeasuredEngine(Protocol):
    """Engine as its precision is measured by; all ranks call the same together."""

    def evaluate(self, batches: Sequence[StepBatch]) -> tuple[float, int]:
        """This rank's sum of token losses, and number of tokens."""
        ...

    def forward_backward(self, batch: StepBatch) -> Tensor:
        """This rank's sum of token losses; gradients are of the loss per token of the whole batch."""
        ...

    def reduce(self) -> None: ...

    def replicated_gradients(self) -> list[tuple[str, StateTensor]]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...


@dataclass(frozen=True, slots=True)
class PrecisionPolicy:
    """The decision of one generation.

    Fields:
        low: the parts that compute in low precision.
        error: their relative error of the loss, together, the worst of the batches.
        sensitivity: of every part alone, to first order.
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
    parts: Mapping[str, int],
    errors: Mapping[str, float],
    error_of: ErrorOf,
    bound: float,
    margins: Mapping[str, float] | None = None,
) -> PrecisionPolicy:
    """Choose the parts that compute in low precision, so that the loss errs by at most ``bound`` of itself.

    Args:
        errors: relative errors of the loss by each part alone.
        margins: factors of the parts' errors, at least 1; None: all 1.
    """
    margins = dict.fromkeys(parts, 1.0) if margins is None else margins
    revised = {part: errors[part] * margins[part] for part in parts}
    low: list[str] = []
    spent = 0.0
    for part in sorted(parts, key=lambda part: revised[part] / parts[part]):
        if spent + revised[part] <= bound:
            low.append(part)
            spent += revised[part]
    low.sort(key=lambda part: revised[part])
    error = 0.0
    for _ in range(MEASURES):
        error = error_of(frozenset(low)) if low else 0.0
        seen = error * _margin(low, errors, revised)
        if seen <= bound:
            break
        low = _fewer(low, revised, bound / seen if math.isfinite(seen) else 0.5)
    else:
        low, error = [], 0.0
    return PrecisionPolicy(frozenset(low), error, errors, margins)


def _or_worse(error: float) -> float:
    """Order errors; NaN is worse than all."""
    return math.inf if math.isnan(error) else error


def _fewer(low: Sequence[str], revised: Mapping[str, float], share: float) -> list[str]:
    """Keep the parts of least error that make up a share of all their error, and not all of them."""
    left, kept = share * sum(revised[part] for part in low), list[str]()
    for part in low[:-1]:
        left -= revised[part]
        if left < 0.0:
            break
        kept.append(part)
    return kept


def _margin(low: Sequence[str], errors: Mapping[str, float], revised: Mapping[str, float]) -> float:
    """Return the factor by which several parts' joint error counts, from the factors of each."""
    total = sum(errors[part] for part in low)
    return sum(revised[part] for part in low) / total if total > 0.0 else 1.0


class Adaptation(Protocol):
    """The part of a step that decides in which precision the model's parts compute."""

    def observe(self, gradients: Sequence[Tensor]) -> None:
        """Look at a step's gradients, reduced and not clipped; all ranks together."""

    def step(self, *, moved: bool = True) -> None:
        """Hear that a step has ended; whether the gradients observed last have moved the weights."""

    def changes(self) -> Mapping[str, Sequence[str]]:
        """Parts that have risen or fallen since the last call, by which of both; empty: none have."""
        ...

    def decide(self, batches: Sequence[StepBatch], engine: MeasuredEngine) -> PrecisionPolicy | None:
        """Choose the parts from the weights as they are; None where the job's precision holds for all."""
        ...


class FixedPrecision:
    """The job's precision for every part."""

    def observe(self, gradients: Sequence[Tensor]) -> None:
        """Look at nothing."""

    def step(self, *, moved: bool = True) -> None:
        """Keep nothing."""

    def changes(self) -> Mapping[str, Sequence[str]]:
        """Change nothing."""
        return {}

    def decide(self, batches: Sequence[StepBatch], engine: MeasuredEngine) -> PrecisionPolicy | None:
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
        job: JobConfig,
        sizes: Mapping[str, int],
        switches: PrecisionSwitches,
        parameters: Sequence[LocalParameter],
        layout: Layout,
        device: torch.device,
        variability: GradientVariability,
        scaling: Scaling,
    ) -> None:
        self._config, self._low_type = job.adaptive_precision, LOW[job.precision]
        self._layout, self._device, self._variability, self._scaling = layout, device, variability, scaling
        self._sizes, self._switches, self._parameters = sizes, switches, list(parameters)
        self._part = part_of_each((p.spec.name for p in parameters), list(self._sizes))
        counted = [parameter.counted for parameter in parameters]
        self._sums = PartSums(counted, self._part, len(self._sizes), layout, device)
        self._watch = StabilityWatch(list(sizes), self._config.calm_steps)
        self._chosen: frozenset[str] = frozenset(sizes)
        self._steps = 0
        self._observed: Tensor | None = None
        self._arriving: tuple[LateNumbers, bool] | None = None
        self._changes: dict[str, list[str]] = {}

    def observe(self, gradients: Sequence[Tensor]) -> None:
        """Look at a step's gradients, reduced and not clipped; all ranks together."""
        if self._steps % COUNTED_EVERY:
            self._observed = self._sums.of(gradients)
        else:
            scale = self._scaling.scale
            self._observed = self._sums.of(gradients, lambda x: count_elements(x, self._low_type, scale), 3)

    def step(self, *, moved: bool = True) -> None:
        """Take in the gradients of the step before, and let those that were observed last be on their way."""
        if self._arriving is not None:
            (numbers, had_moved), self._arriving = self._arriving, None
            self._judge(figures_of(numbers.read()), had_moved)
        self._steps += 1
        if self._observed is not None:
            self._arriving, self._observed = (LateNumbers(self._observed), moved), None

    def _judge(self, figures: GradientFigures, moved: bool) -> None:
        if moved:
            self._variability.observe(figures.norms)
        rising, falling = self._watch.judge(figures, self._chosen)
        if rising or falling:
            self._switches.set(self._chosen - set(self._watch.raised))
        for name, parts in (("raised", rising), ("lowered", falling)):
            if parts:
                self._changes.setdefault(name, []).extend(parts)

    def changes(self) -> Mapping[str, Sequence[str]]:
        """Parts that have risen to full precision, or fallen back, since the last call."""
        found, self._changes = self._changes, {}
        return found

    def decide(self, batches: Sequence[StepBatch], engine: MeasuredEngine) -> PrecisionPolicy:
        """Choose the parts from the weights as they are, and set them; all ranks together.

        Args:
            batches: this rank's part of held-out batches, of which ``adaptive_precision.batches`` are used.
        """
        assert self._config.error_bound is not None
        used = batches[: self._config.batches]
        exact, errors = self._first_order(used, engine)

        def measured(low: frozenset[str]) -> float:
            self.set(low)
            found = self._over_ranks([engine.evaluate([batch])[0] for batch in used], dist.ReduceOp.SUM)
            return max(abs(a / b - 1.0) for a, b in zip(found, exact, strict=True))

        margins = self._over_ranks(self._variability.margins(len(self._sizes)), dist.ReduceOp.MAX)
        by_part = dict(zip(self._sizes, margins, strict=True))
        found = choose(self._sizes, errors, measured, self._config.error_bound, by_part)
        self.set(found.low)
        return found

    def _first_order(
        self, batches: Sequence[StepBatch], engine: MeasuredEngine
    ) -> tuple[list[float], dict[str, float]]:
        """Exact losses of the batches, and relative errors by each part alone, the worst batch's."""
        losses, worst = [], [0.0] * len(self._sizes)
        self.set(())
        for batch in batches:
            errors = RoundingErrors(list(self._sizes), self._low_type, self._device)
            with errors.watching(engine.named_modules()):
                loss = engine.forward_backward(batch)
            scale = self._scaling.scale
            errors.sums /= torch.tensor([scale, scale * scale], device=self._device)
            engine.reduce()
            gradients = [gradient.values() for _, gradient in engine.replicated_gradients()]
            errors.add_weights(self._parameters, gradients, self._part)
            numbers = [float(loss), *errors.sums.flatten().tolist()]
            total, *found = self._over_ranks(numbers, dist.ReduceOp.SUM)
            losses.append(total)
            sizes = map(error_of, found[::2], found[1::2])
            relative = [abs(size * batch.loss_tokens / total) for size in sizes]
            worst = [max(pair, key=_or_worse) for pair in zip(worst, relative, strict=True)]
        return losses, dict(zip(self._sizes, worst, strict=True))

    def set(self, low: Collection[str]) -> None:
        """Let these parts compute in low precision from now on, the others in full."""
        self._chosen = frozenset(low)
        self._switches.set(low)

    def _over_ranks(self, numbers: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        values = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if self._layout.world_size > 1:
            dist.all_reduce(values, op=how)
        found: list[float] = values.tolist()
        return found


def choose_adaptation(
    job: JobConfig,
    sizes: Mapping[str, int],
    switches: PrecisionSwitches,
    parameters: Sequence[LocalParameter],
    layout: Layout,
    device: torch.device,
    variability: GradientVariability,
    scaling: Scaling,
) -> Adaptation:
    """Return what a job asks for: `AdaptivePrecision` under an error bound, else `FixedPrecision`."""
    if job.adaptive_precision.error_bound is None:
        return FixedPrecision()
    return AdaptivePrecision(job, sizes, switches, parameters, layout, device, variability, scaling)
