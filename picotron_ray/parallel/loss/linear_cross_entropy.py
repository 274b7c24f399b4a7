"""Chunked fused linear cross-entropy: the head's product and the loss, over a few tokens at a time.

The logits of all tokens never exist at once. Forward keeps the log-sum-exp of each token. Backward computes
the logits of a chunk again and turns them into their gradient in place. Making gradients in the forward pass
(Hsu et al. 2024, Liger Kernel; torch's own ``linear_cross_entropy``) would save that fourth product. It is
not done here, for three reasons:

- The loss is not scaled yet. Under fp16 small gradients would vanish before the loss scale can save them.
- Each micro-batch in flight would keep a gradient as large as the head's weight, and pipelines have many.
- Gradients would be scaled in place. Schedules that split the backward pass run it twice, once for the input
  and once for the weight, and would scale twice.

Over a vocabulary that is cut (Shoeybi et al. 2019, section 3) three numbers per token are reduced, for all
chunks at once: the largest log-sum-exp, the sum of the shares in it, the target's logit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from picotron_ray.comm.collectives.assigned import count_all_reduce
from picotron_ray.models.layers.softcap import softcap
from picotron_ray.parallel.precision.wide_sums import add_product


class LinearCrossEntropy:
    """Token losses from hidden states, for one rank of a tp group.

    Args:
        chunk: tokens whose logits exist at a time.
        group: the ranks over which the vocabulary is cut; None: it is whole.
        first: the id of the first row of the vocabulary on this rank.
        cap: of logits (``models.layers.softcap``); None: there is none.
    """

    def __init__(
        self,
        chunk: int,
        group: dist.ProcessGroup | None = None,
        first: int = 0,
        cap: float | None = None,
    ) -> None:
        self.chunk, self.group, self.first, self.cap = chunk, group, first, cap

    def __call__(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """Token losses in nats, fp32 or wider, equal to `cross_entropy.token_losses` of the logits.

        Args:
            x: ``[rows, seq, hidden]``; weight ``[vocabulary here, hidden]``.
            targets: ``[rows, seq]`` int64 global token ids.

        Returns: ``[rows, seq]``. The gradient of ``x`` is this rank's part of a sum over the group.
        """
        kind = x.device.type
        if torch.is_autocast_enabled(kind):  # as autocast casts a linear layer's input; the weight follows
            x = x.to(torch.get_autocast_dtype(kind))
        # a view, because the engine cannot say of a leaf whether its gradient is asked for
        found: Tensor = _ChunkedLoss.apply(x.flatten(0, -2), weight.view_as(weight), targets, self)
        return found

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Ranges of tokens, one per chunk."""
        return (slice(start, start + self.chunk) for start in range(0, tokens, self.chunk))

    def local(self, targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Index of each target in this rank's ``rows`` of the vocabulary, and whether it is among them."""
        local = targets - self.first
        inside = (local >= 0) & (local < rows)
        return torch.where(inside, local, 0).unsqueeze(-1), inside

    def over_vocabulary(self, total: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """Reduce log-sum-exp and target logit of each token over the ranks' parts of the vocabulary."""
        if self.group is None:
            return total, picked
        peak = total.clone()
        dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.group)
        count_all_reduce(self.group, peak)
        both = torch.stack(((total - peak).exp(), picked))
        dist.all_reduce(both, group=self.group)
        count_all_reduce(self.group, both)
        return both[0].log() + peak, both[1]


def _logits(x: Tensor, weight: Tensor, cap: float | None) -> Tensor:
    """Logits ``[tokens, vocab]`` in fp32 or wider, from a product in the type of ``x``."""
    found = x @ weight.T
    found = found if found.dtype == torch.float64 else found.float()
    return found if cap is None else softcap(found, cap)


def _gradient_of_logits(
    how: LinearCrossEntropy, x: Tensor, weight: Tensor, targets: Tensor, total: Tensor, gradient: Tensor
) -> Tensor:
    """Make the logits of a chunk again and turn them into their gradient, in the type of ``x``.

    Args:
        total: log-sum-exp of each token; gradient: of its loss.
    """
    found = _logits(x, weight, how.cap)
    slope = None if how.cap is None else (found / how.cap).square_().neg_().add_(1)
    found.sub_(total.unsqueeze(-1)).exp_()
    at, inside = how.local(targets, len(weight))
    found.scatter_add_(-1, at, -inside.to(found.dtype).unsqueeze(-1))
    found.mul_(gradient.unsqueeze(-1))
    return (found if slope is None else found.mul_(slope)).to(x.dtype)


class _ChunkedLoss(torch.autograd.Function):
    """Autograd function of the loss: ``x [n, hidden]`` in the type of products, ``targets`` of n tokens.

    The losses have the targets' shape and are no view, because FSDP's hooks must not get one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, how: LinearCrossEntropy) -> Tensor:
        losses = x.new_empty(targets.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        targets = targets.flatten()
        total, picked = (losses.new_empty(len(x)) for _ in range(2))
        with torch.autocast(x.device.type, enabled=False):
            cast = weight.to(x.dtype)
            for part in how.chunks(len(x)):
                logits = _logits(x[part], cast, how.cap)
                at, inside = how.local(targets[part], len(weight))
                picked[part] = logits.gather(-1, at).squeeze(-1) * inside
                total[part] = logits.logsumexp(dim=-1)
                del logits  # before the next ones are made
            total, picked = how.over_vocabulary(total, picked)
        ctx.save_for_backward(x, weight, targets, total)
        ctx.how = how
        torch.sub(total, picked, out=losses.view(-1))
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, targets, total = ctx.saved_tensors
        gradient = gradients[0].flatten()
        how, cast = ctx.how, weight.to(x.dtype)
        for_x, for_weight = _asked_for(ctx)
        found_x = torch.empty_like(x) if for_x else None
        wide = torch.promote_types(weight.dtype, torch.float32)  # over chunks; autograd casts the sum
        found_weight = torch.zeros_like(weight, dtype=wide) if for_weight else None
        for part in how.chunks(len(x)):
            of_logits = _gradient_of_logits(how, x[part], cast, targets[part], total[part], gradient[part])
            if found_x is not None:
                torch.mm(of_logits, cast, out=found_x[part])
            if found_weight is not None:
                add_product(found_weight, of_logits.T, x[part])
            del of_logits  # before the next ones are made
        return found_x, found_weight, None, None


def _asked_for(ctx: Any) -> list[bool]:
    """Whether the current backward pass needs gradients of the input, and of the weight."""
    nodes = [node for node, _ in ctx.next_functions[:2]]
    return [node is not None and torch._C._will_engine_execute_node(node) for node in nodes]
