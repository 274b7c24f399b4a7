"""Sensitivity of the loss to low precision in each part of a model, from one backward pass.

To first order a rounding error ``d`` of a number changes the loss by ``d`` times the loss's gradient there.
So one forward and backward pass in full precision tells what rounding would add, part by part: the sum of
gradient times rounding error over the part's weights, and over what goes into and comes out of the part and
each of its linear layers (the first term of the Taylor expansion, as in LeCun et al. 1990 for weights that
are removed). Rounding is that of the numbers at hand, with its sign. Where errors happen to cancel, the next
batch's will not: then what independent errors of that size add up to counts, the root of the sum of squares.
What happens inside kernels, such as attention's scores, is not seen: `adaptive` measures the error of its
choice as a whole.

Terms are summed over all ranks. Each rank adds what it computes: its tokens, its part of a cut layer's
gradient, and of weights those that it counts in the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from picotron_ray.parallel.local_shards import LocalParameter


class _Watched(torch.autograd.Function):
    """``x`` as it is; backward adds gradient times rounding error to a sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: torch.dtype, total: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.low, ctx.total = low, total
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.total.add_(_error(ctx.saved_tensors[0], gradients[0], ctx.low))
        return gradients[0], None, None


def _error(x: Tensor, gradient: Tensor, low: torch.dtype) -> Tensor:
    """Sum of gradient times rounding error, and of squares of that, ``[2]`` fp64."""
    terms = ((x.to(low).to(x.dtype) - x) * gradient).double()
    return torch.stack((terms.sum(), terms.square().sum()))


def error_of(total: float, squares: float) -> float:
    """Size of a part's error from its two sums over all ranks.

    >>> error_of(-0.5, 0.01), error_of(0.0, 0.25)
    (0.5, 0.5)
    """
    return max(abs(total), math.sqrt(squares)) if squares >= 0.0 else math.nan


class RoundingErrors:
    """First-order errors of the loss by part, of one or several backward passes.

    Args:
        parts: names of modules; none lies within another.
        low: the type to which they would round.

    Fields:
        sums: ``[parts, 2]`` fp64 on the device, of this rank: of errors, signed, and of their squares.
    """

    def __init__(self, parts: Sequence[str], low: torch.dtype, device: torch.device) -> None:
        self._parts, self._low = list(parts), low
        self.sums = torch.zeros((len(self._parts), 2), dtype=torch.float64, device=device)

    @contextmanager
    def watching(self, modules: Iterable[tuple[str, nn.Module]]) -> Iterator[None]:
        """Watch what goes into and out of parts, and linear layers within them, while the body computes."""
        handles = []
        for name, module in modules:
            at = next((n for n, part in enumerate(self._parts) if f"{name}.".startswith(f"{part}.")), None)
            if at is None or not (isinstance(module, nn.Linear) or name in self._parts):
                continue
            total = self.sums[at]
            handles.append(module.register_forward_pre_hook(self._before(total), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after(total)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, total: Tensor) -> Any:
        def hook(_: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
            watched = {key: self._watched(value, total) for key, value in named.items()}
            return tuple(self._watched(value, total) for value in inputs), watched

        return hook

    def _after(self, total: Tensor) -> Any:
        return lambda _, inputs, output: self._watched(output, total)

    def _watched(self, x: Any, total: Tensor) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad:
            return _Watched.apply(x, self._low, total)
        return x

    def add_weights(
        self, parameters: Sequence[LocalParameter], gradients: Sequence[Tensor], part: Sequence[int]
    ) -> None:
        """Add the weights' terms, from their summed gradients; ``part``: of each its index, or -1."""
        for parameter, gradient, at in zip(parameters, gradients, part, strict=True):
            if at >= 0 and parameter.counted:
                self.sums[at] += _error(parameter.local, gradient, self._low)
