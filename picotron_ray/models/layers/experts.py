"""Experts of a mixture: stacked hidden layers, and the products by which rows grouped by expert go through.

Where experts have biases, each row gets those of its own expert. Their gradients are sums over an expert's
rows, in the order of the rows and in fp32 or wider: bits repeat on any device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from picotron_ray.models.layers.expert_counts import Counts
from picotron_ray.models.layers.fused_linear import computed_in, joined
from picotron_ray.models.layers.pointwise import Gate, silu_gate
from picotron_ray.models.layers.transport import Shipment


class ExpertStacks(NamedTuple):
    """Weights and biases of some experts, stacked (`Experts`); no bias: None."""

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def split(self, sizes: Sequence[int]) -> Iterator[ExpertStacks]:
        """Those of as many experts each."""
        if len(sizes) == 1:
            yield self
            return
        weights = [stack.split(list(sizes)) for stack in self[:3]]
        biases = [None if stack is None else stack.split(list(sizes)) for stack in self[3:]]
        for chunk in range(len(sizes)):
            gate, up, down = (part[chunk] for part in weights)
            yield ExpertStacks(gate, up, down, *(None if part is None else part[chunk] for part in biases))


def _each(bias: Tensor | None) -> Any:
    """The bias of each expert, or as many times None."""
    return repeat(None) if bias is None else bias


class _BiasOfRows(torch.autograd.Function):
    """Biases ``[experts, n]``, ends of the experts' rows, number of rows → ``[rows, n]``."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, ends: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(ends)
        every = torch.arange(rows, device=bias.device)
        # rows that are nobody's get the last one's: nobody reads them
        return bias[torch.searchsorted(ends, every, right=True).clamp_(max=len(bias) - 1)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (ends,) = ctx.saved_tensors
        (gradient,) = gradients
        starts = F.pad(ends, (1, 0))
        every = torch.arange(len(gradient), device=gradient.device)
        return F.embedding_bag(every, gradient, starts, mode="sum", include_last_offset=True), None, None


def looped(rows: Tensor, counts: Counts, stacks: ExpertStacks, activation: Gate) -> Tensor:
    """One expert after the other; arguments as in `Experts.products`."""
    *parts, rest = rows.split(counts.lengths(len(rows)))
    out = [
        F.linear(activation(F.linear(x, g, g_bias), F.linear(x, u, u_bias)), d, d_bias)
        for x, g, u, d, g_bias, u_bias, d_bias in zip(parts, *map(_each, stacks), strict=False)
    ]
    return torch.cat((*out, torch.zeros_like(rest)))


def looped_fused(rows: Tensor, counts: Counts, stacks: ExpertStacks, activation: Gate) -> Tensor:
    """As `looped`, gate and up of an expert by one product."""
    dtype = computed_in(stacks.gate)
    both = joined((stacks.gate, stacks.up), dtype)
    biases = _each(_side_by_side(stacks, dtype)), _each(stacks.down_bias)
    *parts, rest = rows.split(counts.lengths(len(rows)))
    out = []
    for x, inner, outer, inner_bias, outer_bias in zip(parts, both, stacks.down, *biases, strict=False):
        opened, passed = F.linear(x, inner, inner_bias).chunk(2, dim=-1)
        out.append(F.linear(activation(opened, passed), outer, outer_bias))
    return torch.cat((*out, torch.zeros_like(rest)))


def _side_by_side(stacks: ExpertStacks, dtype: torch.dtype) -> Tensor | None:
    """Biases of gate and up as those of one matrix, ``[experts, 2 inner]``."""
    if stacks.gate_bias is None or stacks.up_bias is None:
        return None
    return torch.cat((stacks.gate_bias, stacks.up_bias), dim=-1).to(dtype)


PACKED = 128
"""Values that share a scale where activations are kept in 8 bits: rows of a multiple of it share none."""


def _grouped_product(x: Tensor, weights: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
    ends = counts.cumsum(0).to(x.device, torch.int32)
    found: Tensor = F.grouped_mm(x, weights.to(x.dtype).transpose(-2, -1), offs=ends)
    if found.size(-1) % PACKED:  # rows that are nobody's may hold NaN, and share a scale with the last one
        nobodys = torch.arange(len(found), device=found.device) >= ends[-1]
        found = found.masked_fill(nobodys.unsqueeze(-1), 0.0)
    if bias is not None:
        added: Tensor = _BiasOfRows.apply(bias.to(found.dtype), counts.cumsum(0), len(found))
        found = found + added
    return found


def grouped(rows: Tensor, counts: Counts, stacks: ExpertStacks, activation: Gate) -> Tensor:
    """All experts by one product per matrix, torch's grouped_mm; not in fp64."""
    here = counts.on_device
    opened = _grouped_product(rows, stacks.gate, here, stacks.gate_bias)
    passed = _grouped_product(rows, stacks.up, here, stacks.up_bias)
    return _grouped_product(activation(opened, passed), stacks.down, here, stacks.down_bias)


def grouped_fused(rows: Tensor, counts: Counts, stacks: ExpertStacks, activation: Gate) -> Tensor:
    """As `grouped`, gate and up by one product."""
    here = counts.on_device
    weights = joined((stacks.gate, stacks.up), rows.dtype)
    both = _grouped_product(rows, weights, here, _side_by_side(stacks, rows.dtype))
    opened, passed = both.chunk(2, dim=-1)
    return _grouped_product(activation(opened, passed), stacks.down, here, stacks.down_bias)


Compute = Callable[[Tensor, Counts, ExpertStacks, Gate], Tensor]
COMPUTE: dict[tuple[bool, bool], Compute] = {
    (False, False): looped,
    (False, True): looped_fused,
    (True, False): grouped,
    (True, True): grouped_fused,
}
"""By (grouped, fused)."""


class Experts(nn.Module):
    """Stacked SwiGLUs: gate and up ``[experts, inner, hidden]``, down ``[experts, hidden, inner]``.

    Args:
        biased: whether each matrix has biases, ``[experts, inner]`` and ``[experts, hidden]``.
        activation: see `models.layers.pointwise`.

    Fields:
        grouped: whether one product per matrix serves all experts.
        fused: whether gate and up are one matrix.
        adds_bias: whether this rank adds the biases of ``down``; of ranks that hold parts of the same
            experts' widths, and whose results are summed, one does.
    """

    def __init__(
        self, experts: int, hidden: int, inner: int, *, biased: bool = False, activation: Gate = silu_gate
    ) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, inner, hidden))
        self.up = nn.Parameter(torch.empty(experts, inner, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner))
        self.biased, self.activation = biased, activation
        if biased:
            self.gate_bias = nn.Parameter(torch.empty(experts, inner))
            self.up_bias = nn.Parameter(torch.empty(experts, inner))
            self.down_bias = nn.Parameter(torch.empty(experts, hidden))
        self.grouped = self.fused = False
        self.adds_bias = True

    def fuse(self) -> None:
        self.fused = True

    def stacks(self) -> ExpertStacks:
        """Weights and biases, as `products` takes them."""
        if not self.biased:
            return ExpertStacks(self.gate, self.up, self.down)
        # not left out elsewhere: a parameter without a gradient is one that ranks do not agree on
        down_bias = self.down_bias if self.adds_bias else self.down_bias * 0.0
        return ExpertStacks(self.gate, self.up, self.down, self.gate_bias, self.up_bias, down_bias)

    def forward(self, *buffers: Tensor, shipment: Shipment) -> tuple[Tensor, ...]:
        """Compute chunk after chunk of a shipment: buffers of `Shipment.send` → parts for `collect`.

        All of them in one call: FSDP gathers the weights around it.
        """
        chunks = self.stacks().split(shipment.experts)
        parts = []
        for chunk, (buffer, stacks) in enumerate(zip(buffers, chunks, strict=True)):
            rows, counts = shipment.arrive(chunk, buffer)
            parts.append(shipment.send_back(chunk, self.products(rows, counts, stacks)))
        return tuple(parts)

    def products(self, rows: Tensor, counts: Counts, stacks: ExpertStacks) -> Tensor:
        """Results of rows ``[n, hidden]`` grouped by expert, by the stacked weights of some experts."""
        return COMPUTE[self.grouped, self.fused](rows, counts, stacks, self.activation)
