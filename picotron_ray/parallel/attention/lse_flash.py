"""FlashAttention-2 over parts of rows: no masked score is computed, no mask made, no key head repeated.

It is told of windows as it is, and of documents by where sequences start (``tile_documents``).
"""

from __future__ import annotations

from torch import Tensor

from picotron_ray.parallel.attention.flash_operators import FlashOperators, Sequences
from picotron_ray.parallel.attention.lse_kernels import Forward, Gradients, KeyMask, LseKernel


class FlashKernel(LseKernel):
    """FlashAttention-2: bf16 and fp16, heads of a multiple of 8.

    Args:
        operators: whose kernels compute.
    """

    counts_documents = True

    def __init__(self, operators: FlashOperators) -> None:
        self.operators = operators

    def forward(self, q: Tensor, k: Tensor, v: Tensor, key_mask: KeyMask) -> Forward:
        of = _sequences(q, k, key_mask)
        ends_meet = of.starts is not None
        laid_q, laid_k, laid_v = _laid((q, k, v), ends_meet)
        out, lse = self.operators.forward(laid_q, laid_k, laid_v, of)
        out = _raised(out, q)
        if ends_meet:
            lse = lse.unflatten(1, (q.size(0), -1)).transpose(0, 1)
        if (hidden := _hidden(key_mask)) is not None:
            lse = lse.masked_fill(hidden, float("-inf"))
            out = out.masked_fill(hidden.unsqueeze(-1), 0.0)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, key_mask: KeyMask
    ) -> Gradients:
        of = _sequences(q, k, key_mask)
        ends_meet = of.starts is not None
        if (hidden := _hidden(key_mask)) is not None:
            lse = lse.masked_fill(hidden, float("inf"))  # no weight: exp(score - inf)
        if ends_meet:
            lse = lse.transpose(0, 1).flatten(1)
        laid_grad, laid_q, laid_k, laid_v, laid_out = _laid((grad, q, k, v, out), ends_meet)
        found = self.operators.backward(laid_grad, laid_q, laid_k, laid_v, laid_out, lse.contiguous(), of)
        dq, dk, dv = (_raised(x, like) for x, like in zip(found, (q, k, v), strict=True))
        return dq, dk, dv


def _sequences(q: Tensor, k: Tensor, key_mask: KeyMask) -> Sequences:
    documents, starts = key_mask.documents, None
    if documents is not None:
        starts = documents.starts if key_mask.causal else documents.going_on
    return Sequences(starts, (q.size(-2), k.size(-2)), key_mask.left, key_mask.causal)


def _hidden(key_mask: KeyMask) -> Tensor | None:
    """Mask of queries whose results are not theirs, bool ``[batch, 1, queries]``."""
    if key_mask.documents is None or key_mask.causal:
        return None
    return key_mask.documents.visible.logical_not().unsqueeze(1)


def _laid(heads: tuple[Tensor, ...], ends_meet: bool) -> list[Tensor]:
    """``[batch, heads, row, head]`` → ``[batch, row, heads, head]``, or ``[tokens, heads, head]``."""
    laid = [x.transpose(1, 2) for x in heads]
    return [x.flatten(0, 1) for x in laid] if ends_meet else laid


def _raised(x: Tensor, like: Tensor) -> Tensor:
    """Invert `_laid`."""
    return (x.unflatten(0, (like.size(0), -1)) if x.dim() == 3 else x).transpose(1, 2)
