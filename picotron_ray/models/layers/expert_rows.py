"""Rows of tokens as they go to experts and back: one row for each assignment that is sent.

Each of the two is the other's gradient, and both gather: a token's rows are summed by whoever writes the
token, k ascending. So bits repeat on any device, where `index_add` on CUDA adds in the order in which threads
arrive. The sum is torch's `embedding_bag`, which reads every row once and writes every token once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.count, ctx.top_k = len(tokens), top_k
        return tokens[order // top_k]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _summed(gradients[0], order, ctx.count, ctx.top_k), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, count: int, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return _summed(rows, order, count, top_k)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (order,) = ctx.saved_tensors
        return gradients[0][order // ctx.top_k], None, None, None


def _summed(rows: Tensor, order: Tensor, count: int, top_k: int) -> Tensor:
    sent = len(order)
    if not sent:
        return rows.new_zeros(count, rows.size(-1))
    if sent == count * top_k:
        here = torch.arange(sent, device=order.device)
        places = torch.empty_like(order).index_copy_(0, order, here)
        return F.embedding_bag(places.view(count, top_k), rows, mode="sum")
    places = order.argsort()
    tokens = order[places] // top_k
    starts = torch.searchsorted(tokens, torch.arange(count, device=order.device))
    return F.embedding_bag(places, rows, starts, mode="sum")


def rows_of(tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Return the token of each assignment.

    Args:
        tokens: ``[count, hidden]``.
        order: ``[n]`` assignments that are sent, each as ``token · top_k + k``; none twice.

    Returns:
        ``[n, hidden]``.
    """
    found: Tensor = _Taken.apply(tokens, order, top_k)
    return found


def sum_of_rows(rows: Tensor, order: Tensor, count: int, top_k: int) -> Tensor:
    """Sum the rows ``[n, hidden]`` of each token's assignments, k ascending: ``[count, hidden]``.

    Assignments that were not sent count as zero.
    """
    found: Tensor = _Summed.apply(rows, order, count, top_k)
    return found
