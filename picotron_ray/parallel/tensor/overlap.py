"""Overlap of tensor parallelism's collectives with the matrix products beside them.

Sequence parallelism gathers the input of a block's first products and sums the output of its last ones
(Korthikanti et al. 2022). A product that is cut into one part per rank needs one part of the tokens at a
time, and the others travel meanwhile (Wang et al. 2023, Overlap Communication with Dependent Computation via
Decomposition). `Overlap` has the two operations: gather and multiply, multiply and reduce-scatter. Each is
the other's backward pass. Embedding, head and mixtures of experts gather and sum as without overlap.

Only this rank's part of a gathered input is kept. Backward gathers the others again while it multiplies, as
Megatron-LM does. So less is kept than without overlap, where all of it stays. Gradients of weights are one
product over all tokens, as without overlap. The last transfer is hidden behind it.

Both halves of a backward pass run in one operation. A schedule that splits the backward pass (zero bubble)
would run all of it twice, transfers too, and is refused (``config.validation.kernels``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

ProductsCall = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None]], tuple[Tensor, ...]]


class Overlap(Protocol):
    """Matrix products that overlap their communication over n tp ranks."""

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
            gathered: ``[batch, seq / n, ...]``, gathered over the sequence meanwhile; None: no tensor is.

        Returns: a function that waits for this rank's ``[batch, seq / n, out]`` of the sum, to be called
        once; and the gathered tensor.
        """
        ...


def _tokens(x: Tensor) -> Tensor:
    """``[batch, seq, n]`` → ``[tokens, n]``."""
    return x.flatten(0, 1)


class _GatherProducts(torch.autograd.Function):
    """Gather and multiply: products of all tokens, ``[batch, seq, out]`` each.

    Inputs: x ``[batch, seq / n, in]``, ``count`` weights ``[out, in]``, as many biases or none.
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
        asked = ctx.needs_input_grad[3 : 3 + len(weights)]  # not for frozen ones
        of_weights = [
            _tokens(gradient).t() @ _tokens(whole) if needed else None
            for gradient, needed in zip(gradients, asked, strict=True)
        ]
        of_biases = [_tokens(gradient).sum(0) for gradient in gradients] if ctx.biased else []
        return None, None, finish(), *of_weights, *of_biases


class _ProductScatter(torch.autograd.Function):
    """Multiply and reduce-scatter: x ``[batch, seq, in]``, weight ``[out, in]`` → ``[batch, seq/n, out]``."""

    @staticmethod
    def forward(ctx: Any, overlap: Overlap, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.overlap = overlap
        finish, _ = overlap.scatter([x], [weight.t()], None)
        return finish()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        asked = ctx.needs_input_grad[2]  # not for a frozen one
        (of_x,), whole = ctx.overlap.gather(gradients[0], [weight], keep=asked)
        return None, of_x, _tokens(whole).t() @ _tokens(x) if whole is not None else None


def _as_computed(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Cast to the type of autocast, where it is on, so that transfers are no wider than products."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, *parameters
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor.to(dtype) for tensor in (x, *parameters))


@dataclass(frozen=True, slots=True)
class OverlappedProducts:
    """Overlapped operations, as modules call them.

    Fields:
        products: multiplies an input that is cut over the sequence by several weights, each with a bias or
            all without.
        scattered: ``[batch, seq, in]`` x ``[out, in]`` → this rank's ``[batch, seq / n, out]`` of the sum.
    """

    products: ProductsCall
    scattered: Callable[[Tensor, Tensor], Tensor]


def overlapped_products(overlap: Overlap, compiled: bool) -> OverlappedProducts:
    """Make the operations that modules call.

    Args:
        compiled: whether torch.compile makes the blocks; it must not trace into these operations.
    """

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
