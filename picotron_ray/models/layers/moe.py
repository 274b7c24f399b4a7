"""Mixture of experts: a router, experts stacked in one tensor per matrix, an optional shared expert.

Everything that balances or drops is defined per *row* (sequence), never per micro-batch: what a token
goes through and which gradient it leaves are then the same at every layout, and rows of weight 0, which
only fill shapes, are not routed and not counted. The bias that evens load without a loss moves once per
step, by the load of the whole global batch.

Where the experts are is not known here: a ``Transport`` brings rows to them and back, and a ``Spread`` says
what other ranks hold of the same rows (`layers.transport`). On one rank both do nothing. Nothing between the
router and the sum of results waits for a number from the device, but for `looped` products, which need their
lengths on the host, and for what a transport says of itself.

Auxiliary losses are not added to the loss, which lives on the last pipeline stage: their gradient enters
where the router's output leaves the block (`_Auxiliary`), times the factor that the engine sets per step.

Sources: Shazeer et al. 2017 (top-k gating), Fedus et al. 2021 (auxiliary loss N·Σ f·P, capacity), Zoph et
al. 2022 (z-loss), Wang et al. 2024 (loss-free balance by a bias), DeepSeek-AI 2024 (V3: sigmoid scores,
loss per row, shared expert).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.config.schema.model import MoeConfig
from picotron_ray.models.layers.expert_rows import gated_sum, rows_of, sort_routes
from picotron_ray.models.layers.experts import Experts
from picotron_ray.models.layers.pointwise import Gate, silu_gate
from picotron_ray.models.layers.swiglu import SwiGLU
from picotron_ray.models.layers.transport import Here, RouteLimits, Spread, Transport


class _Auxiliary(torch.autograd.Function):
    """``x`` as it is; backward gives ``loss`` the gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        return gradient, gradient.new_full((), ctx.scale, dtype=ctx.dtype), None


class Routing(NamedTuple):
    """Routes of the tokens of a micro-batch.

    Fields:
        experts: ``[rows, seq, top_k]`` chosen experts.
        gates: the same shape, weight of each.
        kept: the same shape, bool: whether the token is really sent there.
        loss: scalar auxiliary loss, summed over the tokens here; None where there is none.
    """

    experts: Tensor
    gates: Tensor
    kept: Tensor
    loss: Tensor | None


class Router(nn.Module):
    """Scores, choice and balance.

    Fields:
        bias: ``[experts]`` added to the scores for the choice alone (``balance: bias``), else None.
        logit_bias: ``[experts]`` added to what scores are made of, and trained like any parameter; or None.
        held: whether the bias stays as it is (``model.freeze``).
        spread: what other ranks hold of the same rows.
        shares: ranks that compute the same tokens (tensor parallelism): auxiliary losses count once.
        counting: whether a forward pass counts into ``load``; not when activations are computed again.
        load: ``[experts + 1]`` fp64: assignments per expert in this step, chosen before any is dropped, and
            last how many were dropped.
    """

    def __init__(self, config: MoeConfig, hidden: int, *, biased: bool = False) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, hidden))
        self.logit_bias = nn.Parameter(torch.empty(config.experts)) if biased else None
        self.bias = (
            nn.Parameter(torch.empty(config.experts), requires_grad=False)
            if config.balance == "bias"
            else None
        )
        self.held = False
        self.spread: Spread = Here()
        self.shares = 1
        self.counting = True
        self.load: Tensor | None = None

    def forward(self, x: Tensor, weights: Tensor | None) -> Routing:
        """Args: x ``[rows, seq, hidden]``; weights ``[rows]``, or of each token ``[rows, seq]``; None: 1."""
        config = self.config
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            added = None if self.logit_bias is None else self.logit_bias.to(wide)
            logits = F.linear(x.to(wide), self.weight.to(wide), added)
            scores = logits.softmax(dim=-1) if config.router == "softmax" else logits.sigmoid()
            biased = scores.detach() if self.bias is None else scores.detach() + self.bias
            if config.groups > 1:
                biased = _in_best_groups(biased, config)
            experts = biased.topk(config.top_k, dim=-1).indices
            gates = scores.gather(-1, experts)
            if config.normalize:
                gates = gates / gates.sum(dim=-1, keepdim=True)
            if config.scaling != 1.0:
                gates = gates * config.scaling
            live = x.new_ones(len(x), dtype=torch.bool) if weights is None else weights > 0
            live = live.view(len(x), -1)  # [rows, 1], or [rows, seq] where rows hold padding
            chosen = F.one_hot(experts, config.experts).sum(dim=2) * live[..., None]
            kept = self._within_capacity(experts, chosen) & live[..., None]
            loss = self._loss(logits, scores, chosen, live) if torch.is_grad_enabled() else None
            if torch.is_grad_enabled() and self.counting:
                self._count(chosen, live, kept)
        return Routing(experts, gates * kept, kept, loss)

    def _within_capacity(self, experts: Tensor, chosen: Tensor) -> Tensor:
        """Mask of the assignments that come early enough in their row: ``[rows, seq, top_k]`` bool."""
        config, spread = self.config, self.spread
        if config.capacity_factor is None:
            return torch.ones_like(experts, dtype=torch.bool)
        by_chunk = chosen.unflatten(1, (spread.chunks, -1))
        ahead = spread.ahead(by_chunk.sum(dim=2).transpose(0, 1).contiguous())
        # assignments to the same expert by earlier tokens of the row; a token never chooses one twice
        before = by_chunk.cumsum(dim=2) - by_chunk + ahead.transpose(0, 1).unsqueeze(2)
        return before.flatten(1, 2).gather(-1, experts) < self.most_assignments(experts.size(1))

    def most_assignments(self, length: int) -> int:
        """Assignments that a row may have to one expert, of which ``length`` tokens are here."""
        config = self.config
        if config.capacity_factor is None:
            return length
        even = config.top_k * length * self.spread.parts / config.experts
        return math.ceil(config.capacity_factor * even)

    def _loss(self, logits: Tensor, scores: Tensor, chosen: Tensor, live: Tensor) -> Tensor | None:
        """α·Σ_rows Σ_e f_e·Σ_t p_te  +  β·Σ_t logsumexp², live tokens only.

        f_e is the share of a row's assignments that chose expert e, times the number of experts; p_te the
        token's scores, made to sum to 1. Divided by the number of tokens it is α·N·Σ f·P per row.
        """
        config, total = self.config, None
        weight = live.to(scores.dtype)
        if config.balance == "loss" and config.loss_coefficient:
            counts = self.spread.totals(chosen.sum(dim=1))
            share = counts * (config.experts / counts.sum(dim=-1, keepdim=True).clamp(min=1))
            likely = scores / scores.sum(dim=-1, keepdim=True)
            if weight.size(1) == 1:
                likely = weight * likely.sum(dim=1)
            else:
                likely = torch.einsum("rs,rse->re", weight, likely)
            total = config.loss_coefficient * (share.to(scores.dtype) * likely).sum()
        if config.z_coefficient:
            z = config.z_coefficient * (logits.logsumexp(dim=-1).square() * weight).sum()
            total = z if total is None else total + z
        return None if total is None else total / self.shares

    @torch.no_grad()
    def _count(self, chosen: Tensor, live: Tensor, kept: Tensor) -> None:
        dropped = (~kept & live[..., None]).sum().reshape(1)
        found = torch.cat((chosen.sum(dim=(0, 1)), dropped)).double()
        self.load = found if self.load is None else self.load + found


def _in_best_groups(choice: Tensor, config: MoeConfig) -> Tensor:
    """Scores ``[..., experts]``, of experts outside a token's best groups -inf.

    A group counts by its best expert (DeepSeek-V2, section 2.2.2) or its best two (V3, section 2.1.2).
    """
    grouped = choice.unflatten(-1, (config.groups, -1))
    if config.group_score == "max":
        scores = grouped.amax(dim=-1)
    else:
        scores = grouped.topk(2, dim=-1).values.sum(dim=-1)
    best = scores.topk(config.top_k_groups, dim=-1).indices
    outside = torch.ones_like(scores, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).flatten(-2)


class MixtureOfExperts(nn.Module):
    """Mixture of experts: the hidden layer of a block in place of one SwiGLU.

    Args:
        biased: whether the router and the experts have biases.
        activation: of the experts, see `models.layers.pointwise`.

    Fields:
        transport: brings rows to the ranks that hold their experts.
        scale: gradient of the auxiliary losses, set per step: 1 / tokens of the global batch.
    """

    def __init__(
        self, config: MoeConfig, hidden: int, *, biased: bool = False, activation: Gate = silu_gate
    ) -> None:
        super().__init__()
        self.router = Router(config, hidden, biased=biased)
        self.experts = Experts(
            config.experts, hidden, config.intermediate_size, biased=biased, activation=activation
        )
        width = config.shared_intermediate_size
        self.shared = SwiGLU(hidden, width) if width else None
        self.transport: Transport = Here()
        self.scale = 0.0

    def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
        """``[rows, seq, hidden]`` → the same; what has weight 0 (see `Router`) goes to no expert."""
        routing = self.router(x, weights)
        tokens, transport, length = x.flatten(0, 1), self.transport, x.size(1)
        slots = transport.slots(x.device)
        routes = sort_routes(routing.experts, routing.kept, self.router.config.experts, slots)
        most = min(length, self.router.most_assignments(length))
        shipment = transport.plan(routes, RouteLimits(length, most))
        buffers = shipment.send(_as_computed(rows_of(tokens, shipment.routes)))
        # The shared expert's halves stand between start and end of each transfer, forward and backward.
        hidden = None if self.shared is None else self.shared.inner(x)
        parts = self.experts(*buffers, shipment=shipment)
        shared = None if self.shared is None or hidden is None else self.shared.down(hidden)
        results = shipment.collect(parts)
        out = gated_sum(results, routing.gates.flatten(), shipment.routes).to(x.dtype).view_as(x)
        if shared is not None:
            out = out + shared
        return out if routing.loss is None else _Auxiliary.apply(out, routing.loss, self.scale)


def _as_computed(x: Tensor) -> Tensor:
    """In the type that matrix products will cast to: half the bytes to move under autocast."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
