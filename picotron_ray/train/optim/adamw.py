"""Torch's AdamW, with its moments beside the weights, in full or in 8 bits (`quantized_state`).

In 8 bits, one bucket's moments at a time are decoded, updated by the same kernel, and encoded again. So only
one bucket is ever wide. A block is 256 consecutive elements of a rank's part of a tensor, row after row.
Layouts that cut columns, or rows whose width blocks do not divide, have other blocks, and so other roundings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.train.optim.adamw_offload import MOMENTS, ParameterGroup, ParameterSlice, bucketed, slices
from picotron_ray.train.optim.quantized_state import BLOCK, QuantizedTensor, codebook_of, is_quantizable

BUCKET_ELEMENTS = 4 * 2**20
"""Elements whose moments are decoded at a time; whole blocks. Each takes about 30 bytes meanwhile."""


def update(
    config: OptimizerConfig,
    fused: bool,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    rate: float,
    step: int,
    decay: float,
) -> None:
    """Apply torch's AdamW to a list of tensors, in place.

    Args:
        fused: by one kernel; else by a few operations, each over all tensors (foreach).
        averages: the first moment of each weight.
        squares: the second.
        step: the update's number, from 1: the bias correction's exponent.
    """
    if not weights:
        return
    # A counter per tensor, which torch counts up by one before using it. The fused kernel reads it on the
    # device, foreach on the host: else it would wait for the device.
    device = weights[0].device if fused else torch.device("cpu")
    steps = list(torch.full((len(weights),), step - 1, dtype=torch.float32, device=device).unbind())
    adamw(
        list(weights),
        list(gradients),
        list(averages),
        list(squares),
        [],
        steps,
        fused=fused,
        foreach=not fused,
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        lr=rate,
        weight_decay=decay,
        eps=config.eps,
        maximize=False,
    )


class AdamW:
    """AdamW with its moments beside the weights.

    Fields:
        moments: per moment name, a tensor by the name of each parameter, in its box.
    """

    def __init__(self, config: OptimizerConfig, groups: Sequence[ParameterGroup], fused: bool) -> None:
        self._config, self._groups, self._fused = config, groups, fused
        self.moments = {
            moment: {
                name: torch.zeros_like(weight)
                for group in groups
                for name, weight in zip(group.names, group.weights, strict=True)
            }
            for moment in MOMENTS
        }

    def step(self, gradients: Sequence[Tensor], rate: float, step: int) -> None:
        """Update once; ``step`` is the update's number, from 1."""
        for group in self._groups:
            averages, squares = ([self.moments[moment][name] for name in group.names] for moment in MOMENTS)
            chosen = [gradients[number] for number in group.indices]
            own = rate * group.factor
            update(
                self._config, self._fused, group.weights, chosen, averages, squares, own, step, group.decay
            )


class QuantizedAdamW:
    """AdamW with its moments in 8 bits, for tensors of enough elements in whole blocks.

    Fields:
        moments: per moment name, by the name of each parameter, a `QuantizedTensor` or a plain tensor.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        groups: Sequence[ParameterGroup],
        fused: bool,
        bucket_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self._config, self._fused = config, fused
        self._others = AdamW(config, [_chosen(group, False) for group in groups], fused)
        self.moments: dict[str, dict[str, QuantizedTensor | Tensor]] = {
            moment: dict(kept) for moment, kept in self._others.moments.items()
        }
        self._buckets: list[tuple[list[ParameterSlice], ParameterGroup, list[QuantizedTensor]]] = []
        for group in groups:
            for run in bucketed(_chosen(group, True), 4 * bucket_elements):
                self._add(run, bucket_elements)

    def _add(self, run: ParameterGroup, most: int) -> None:
        """Add moments of parameters that fit one bucket, or of a single one that is cut into several."""
        sizes = [weight.numel() for weight in run.weights]
        device = run.weights[0].device
        flats = []
        for moment in MOMENTS:
            codes = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
            scales = torch.empty(sum(sizes) // BLOCK, dtype=torch.float32, device=device)
            codebook = codebook_of(moment == MOMENTS[0], device)
            flats.append(QuantizedTensor(codes, scales, codebook, (sum(sizes),)))
            flats[-1].zero_()
            start = 0
            for name, weight in zip(run.names, run.weights, strict=True):
                part = flats[-1].part(start, start + weight.numel(), tuple(weight.shape))
                self.moments[moment][name] = part
                start += weight.numel()
        for where, parts in slices(run, most):
            size = (sum(part.weights.numel() for part in parts),)
            kept = [flat.part(where.start, where.start + size[0], size) for flat in flats]
            self._buckets.append((parts, run, kept))

    def step(self, gradients: Sequence[Tensor], rate: float, step: int) -> None:
        """Update once; ``step`` is the update's number, from 1."""
        self._others.step(gradients, rate, step)
        for parts, group, kept in self._buckets:
            sizes = [part.weights.numel() for part in parts]
            chosen = [
                gradients[part.number].reshape(-1).narrow(0, part.start, size)
                for part, size in zip(parts, sizes, strict=True)
            ]
            wide = [moment.values() for moment in kept]
            averages, squares = (values.split(sizes) for values in wide)
            weights = [part.weights for part in parts]
            own = rate * group.factor
            update(self._config, self._fused, weights, chosen, averages, squares, own, step, group.decay)
            for moment, values in zip(kept, wide, strict=True):
                moment.keep(values)


def _chosen(group: ParameterGroup, large: bool) -> ParameterGroup:
    """Select the parameters whose moments are kept in 8 bits, or the others."""
    which = [i for i, weight in enumerate(group.weights) if is_quantizable(weight) is large]
    return group._replace(
        names=[group.names[i] for i in which],
        weights=[group.weights[i] for i in which],
        indices=[group.indices[i] for i in which],
    )
