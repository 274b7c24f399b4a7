"""Adaptive precision: which parts of a model may compute in low precision, by measurement, under a bound.

At the start of every generation, from the weights that it begins with, the held-out loss is measured with all
parts in fp32, and with each part alone in low precision: that is the part's sensitivity, over several batches
the worst of them. Parts are then let down in the order of least error per parameter, as long as the sum of
their errors keeps the bound (errors of single parts add up at most, to first order); what the chosen ones do
together is measured again, and the most sensitive are taken back until that keeps the bound too.

Losses are summed over all ranks, so that every rank finds the same numbers and decides alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from picotron_ray.models.plan import ParameterSpec

LossWith = Callable[[frozenset[str]], Sequence[float]]
"""The losses of several batches with those parts in low precision, the others in full."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What was decided.

    Fields:
        low: the parts that compute in low precision.
        error: their relative error of the loss, together, the worst of the batches.
        sensitivity: of every part alone.
    """

    low: frozenset[str]
    error: float
    sensitivity: Mapping[str, float]


def parts_of(table: Iterable[ParameterSpec]) -> dict[str, int]:
    """The parts that are decided about, and the parameters of each: what holds matrices, embeddings aside."""
    found: dict[str, int] = {}
    for spec in table:
        if len(spec.shape) > 1 and not spec.embedding:
            path = spec.name.split(".")
            part = ".".join(path[:-2]) or path[0]
            found[part] = found.get(part, 0) + spec.numel
    return found


def choose(parts: Mapping[str, int], loss_with: LossWith, bound: float) -> Policy:
    """The parts to compute in low precision, so that the loss errs by at most ``bound`` of itself."""
    exact = loss_with(frozenset())

    def error_of(low: Collection[str]) -> float:
        found = loss_with(frozenset(low))
        return max(abs(a / b - 1.0) for a, b in zip(found, exact, strict=True))

    errors = {part: error_of([part]) for part in parts}
    low: list[str] = []
    spent = 0.0
    for part in sorted(parts, key=lambda part: errors[part] / parts[part]):
        if spent + errors[part] <= bound:
            low.append(part)
            spent += errors[part]
    low.sort(key=lambda part: errors[part])
    error = error_of(low) if low else 0.0
    while low and not error <= bound:
        low.pop()
        error = error_of(low) if low else 0.0
    return Policy(frozenset(low), error, errors)


class AdaptivePrecision:
    """The switches of one rank's parts; all low at first.

    Args:
        models: this rank's stages, already made to compute in low precision (`precision.apply_precision`).
        parts: names of modules, of which a rank may have few.
        full: the type of parameters, in which a part computes that is not low.
    """

    def __init__(
        self, models: Iterable[nn.Module], parts: Collection[str], device: torch.device, full: torch.dtype
    ) -> None:
        self._low = set(parts)
        self._device, self._full = device.type, full
        for model in models:
            for name, module in model.named_modules():
                if name in parts:
                    self._wrap(name, module)

    def _wrap(self, name: str, module: nn.Module) -> None:
        inner = module.forward

        def forward(*inputs: Tensor | None, **named: Tensor | None) -> Tensor:
            if name in self._low:
                return inner(*inputs, **named)
            with torch.autocast(self._device, enabled=False):
                return inner(*map(self._raised, inputs), **{k: self._raised(x) for k, x in named.items()})

        module.forward = forward

    def _raised(self, x: Tensor | None) -> Tensor | None:
        return x.to(self._full) if isinstance(x, Tensor) and x.is_floating_point() else x

    def set(self, low: Collection[str]) -> None:
        """From now on these parts compute in low precision, the others in full."""
        self._low = set(low)
