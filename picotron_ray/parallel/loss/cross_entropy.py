"""Cross-entropy per token, over logits that are whole or cut over the vocabulary.

The cut form is Megatron-LM's (Shoeybi et al. 2019, section 3). Instead of gathering logits it reduces three
numbers per token over tp: the maximum, the sum of exponentials and the target's logit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from picotron_ray.comm.collectives.assigned import count_all_reduce


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Loss per token ``[n]`` from logits ``[n, local]`` of the ids from ``first`` on, and targets ``[n]``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: dist.ProcessGroup) -> Tensor:
        peak = logits.max(dim=-1).values
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        count_all_reduce(group, peak)
        shifted = logits - peak.unsqueeze(-1)
        local = targets - first
        inside = (local >= 0) & (local < logits.size(-1))
        local = torch.where(inside, local, 0)
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1) * inside
        softmax = shifted.exp_()
        both = torch.stack((softmax.sum(dim=-1), picked))
        dist.all_reduce(both, group=group)
        count_all_reduce(group, both)
        total, picked = both
        ctx.save_for_backward(softmax.div_(total.unsqueeze(-1)), local, inside)
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, inside = ctx.saved_tensors
        (gradient,) = gradients
        result = softmax * gradient.unsqueeze(-1)
        result.scatter_add_(-1, local.unsqueeze(-1), (-gradient * inside).unsqueeze(-1))
        return result, None, None, None


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Sum over rows of weight x the row's summed token losses.

    Args:
        losses: of tokens, ``[rows, seq]``.
        weights: ``[rows]``; rows of weight 0 add nothing to loss or gradient.
    """
    return (losses.sum(dim=1) * weights.to(losses.dtype)).sum()


def at_least_fp32(logits: Tensor) -> Tensor:
    """Logits in fp32 where they come in 16 bits, in which a sum over a large vocabulary would lose much."""
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def token_losses(
    logits: Tensor, targets: Tensor, tp_group: dist.ProcessGroup | None, first: int = 0
) -> Tensor:
    """Losses of tokens ``[rows, seq]`` in nats; at least fp32.

    Args:
        logits: ``[rows, seq, vocab]``, or with a ``tp_group`` this rank's part of the vocabulary.
        targets: ``[rows, seq]`` int64 global token ids.
        first: the id of the first logit here.
    """
    flat = at_least_fp32(logits.flatten(0, 1))
    if tp_group is None:
        losses = F.cross_entropy(flat, targets.flatten(), reduction="none")
    else:
        losses = _VocabParallelCrossEntropy.apply(flat, targets.flatten(), first, tp_group)
    return losses.view(targets.shape)
