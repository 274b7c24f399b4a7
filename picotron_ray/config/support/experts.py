"""Choice of how rows travel to experts on other ranks, for a device, a model and a layout. Torch-free."""

from __future__ import annotations

import math

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import MoeConfig

MOST_PADDING = 1.5
"""Rows that padding may send, as a multiple of those of even routes, where nobody asked for it."""
CHUNKED_EXPERTS = 4
"""Experts of a rank from which on its rows come in two chunks, where nobody said in how many."""


def padding(moe: MoeConfig, ep: int, cp: int = 1, chunks: int = 1) -> float:
    """Rows that a padded exchange sends, as a multiple of those of even routes.

    A token goes to an expert once at most, and an expert's capacity is that of whole rows: all of it may be
    asked for by one part of them (``cp``). Each chunk is padded by itself.

    >>> padding(MoeConfig(experts=8, top_k=2, capacity_factor=1.25), 4)
    1.25
    >>> padding(MoeConfig(experts=8, top_k=2, capacity_factor=1.25), 4, cp=2)
    2.5
    >>> padding(MoeConfig(experts=8, top_k=2), 4), padding(MoeConfig(experts=8, top_k=1), 4, chunks=2)
    (4.0, 8.0)
    """
    local = moe.experts // ep
    count = min(chunks, local)
    sizes = [local // count + (number < local % count) for number in range(count)]
    each = math.inf if moe.capacity_factor is None else moe.capacity_factor * cp * moe.top_k / moe.experts
    return sum(min(each * size, min(moe.top_k, size)) for size in sizes) / (moe.top_k * local / moe.experts)


def pads_experts(job: JobConfig, device: str, ep: int, cp: int = 1) -> bool:
    """Whether rows travel to experts in padded numbers; by auto where it costs a GPU little."""
    asked = job.kernels.expert_exchange
    if asked != "auto":
        return asked == "padded"
    return device == "cuda" and _padded(job, device, ep, cp) <= MOST_PADDING


def rows_sent(job: JobConfig, ep: int, cp: int = 1) -> float:
    """Rows that travel to experts, and that they compute with, as a multiple of those of even routes."""
    device = job.cluster.device
    padded = ep > 1 and pads_experts(job, device, ep, cp)
    return max(1.0, _padded(job, device, ep, cp)) if padded else 1.0


def _padded(job: JobConfig, device: str, ep: int, cp: int) -> float:
    return padding(job.model.moe, ep, cp, expert_chunks(job, device, ep))


def expert_chunks(job: JobConfig, device: str, ep: int) -> int:
    """Return the number of transfers that take a micro-batch's rows to their experts."""
    asked = job.kernels.expert_chunks
    if asked != "auto":
        return asked
    return 2 if device == "cuda" and job.model.moe.experts // ep >= CHUNKED_EXPERTS else 1
