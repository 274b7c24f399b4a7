"""Tensor parallelism's collectives hidden behind the matrix products that they feed, or that feed them.

Sequence parallelism gathers the input of a block's first products and sums what its last ones give
(Korthikanti et al. 2022). Cut into one part per rank, a product needs one part of the tokens at a time, and
others travel meanwhile (Wang et al. 2023, Overlap Communication with Dependent Computation via
Decomposition). Both directions are the two operations of `Overlap`: gather and multiply, multiply and
reduce-scatter; each is the other's backward pass. Embedding, head and mixtures of experts gather and sum as
without overlap.

Of a gathered input this rank's part alone is kept; backward gathers the others again while it multiplies, as
Megatron-LM does. So less is kept than without overlap, where all of it stays. Gradients of weights are one
product over all tokens, as without overlap, behind which the last transfer is hidden.

Both halves of a backward pass run in one: a schedule that splits it (zero bubble) would run all of it twice,
transfers too. Such are refused (``config.kernel_rules``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

OverlapMethod = Literal["none", "ring", "symmetric-memory"]
Products = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None]], tuple[Tensor, ...]]


class Overlap(Protocol):
    """Products whose communication over n tp ranks is hidden behind them."""

    def gather(self, x: Tensor, factors: Sequence[Tensor], keep: bool) -> tuple[list[Tensor], Tensor | None]:
        """Gather over the sequence and multiply.

        Args:
            x: this rank's tokens ``[batch, seq / n, in]``.
            factors: ``[in, out]`` each.

        Returns: ``[batch, seq, out]`` for each factor; with ``keep`` the gathered ``[batch, seq, in]`` too.
        """
        ...

    def scatter(
        self, xs: Sequence[Tensor], factors: Sequence[Tensor], gathered: Tensor | None
    ) -> tuple[Callable[[], Tensor], Tensor | None]:
        """Multiply and sum, over the pairs and over the ranks, cut over the sequence.

        Args:
            xs: ``[batch, seq, in]`` each, and their factors ``[in, out]``, all of one ``out``.
            gathered: ``[batch, seq / n, ...]``, gathered over the sequence meanwhile; None: nothing is.

        Returns: what waits for this rank's ``[batch, seq / n, out]`` of the sum, to be called once; and what
        was gathered.
        """
        ...


def _tokens(x: Tensor) -> Tensor:
    """``[batch, seq, n]`` → ``[tokens, n]``."""
    return x.flatten(0, 1)


class _GatherProducts(torch.autograd.Function):
    """x ``[batch, seq / n, in]``, ``count`` weights ``[out, in]``, as many biases or none → products of all
    tokens, ``[batch, seq, out]`` each.
    """

    @staticmethod
    def forward(ctx: Any, overlap: Overlap, count: int, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        found, _ = overlap.gather(x, [weight.t() for weight in weights], keep=False)
        ctx.save_for_backward(x, *weights)
        ctx.overlap, ctx.biased = overlap, bool(biases)
        return tuple(y.add_(bias) for y, bias in zip(found, biases, strict=True)) if biases else tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        finish, whole = ctx.overlap.scatter(gradients, weights, x)
        of_weights = [_tokens(gradient).t() @ _tokens(whole) for gradient in gradients]
        of_biases = [_tokens(gradient).sum(0) for gradient in gradients] if ctx.biased else []
        return None, None, finish(), *of_weights, *of_biases


class _ProductScatter(torch.autograd.Function):
    """x ``[batch, seq, in]``, weight ``[out, in]`` → this rank's ``[batch, seq / n, out]`` of the sum."""

    @staticmethod
    def forward(ctx: Any, overlap: Overlap, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.overlap = overlap
        finish, _ = overlap.scatter([x], [weight.t()], None)
        return finish()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (of_x,), whole = ctx.overlap.gather(gradients[0], [weight], keep=True)
        return None, of_x, _tokens(whole).t() @ _tokens(x)


def _as_computed(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """In the type of autocast, where it is on: what travels is then no wider than what is multiplied."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *parameters
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in (x, *parameters))


@dataclass(frozen=True, slots=True)
class OverlappedProducts:
    """What modules call.

    Fields:
        products: multiplies an input that is cut over the sequence by several weights, each with a bias or
            all without.
        scattered: ``[batch, seq, in]`` x ``[out, in]`` → this rank's ``[batch, seq / n, out]`` of the sum.
    """

    products: Products
    scattered: Callable[[Tensor, Tensor], Tensor]


def overlapped_products(overlap: Overlap, compiled: bool) -> OverlappedProducts:
    """Args: compiled: whether torch.compile makes the blocks; it must not look inside."""

    def products(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        given = [bias for bias in biases if bias is not None]
        x, *parameters = _as_computed(x, *weights, *given)
        with torch.autocast(x.device.type, enabled=False):
            found: tuple[Tensor, ...] = _GatherProducts.apply(overlap, len(weights), x, *parameters)
        return found

    def scattered(x: Tensor, weight: Tensor) -> Tensor:
        x, weight = _as_computed(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            found: Tensor = _ProductScatter.apply(overlap, x, weight)
        return found

    if compiled:
        return OverlappedProducts(torch.compiler.disable(products), torch.compiler.disable(scattered))
    return OverlappedProducts(products, scattered)
