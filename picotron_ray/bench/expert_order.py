"""Seconds that the order of experts' rows takes, against that of before: by counts on the host.

Both order the same random routes of one micro-batch, by expert as they leave a rank and by expert again as
they arrive from ``RANKS`` ranks that route alike. Rounds alternate, and the ratio is that of the shortest of
each, in one process: other load on the machine makes rounds longer. On CUDA each round ends when the device
has: the wait that the older way has inside is the point.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from picotron_ray.bench.common.machine import machine
from picotron_ray.bench.common.report import machine_line
from picotron_ray.errors import ConfigError
from picotron_ray.models.layers.expert_rows import sort_routes
from picotron_ray.parallel.expert.expert_parallel import arrival_order

RANKS = 4
WARM, ROUNDS = 3, 20


def on_the_host(chosen: Tensor, kept: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Order as before: what is dropped, counts and arrivals each wait for the device."""
    flat = torch.where(kept, chosen, -1).flatten()
    ranked, order = flat.sort(stable=True)
    dropped = int(torch.count_nonzero(flat < 0))
    counts = torch.bincount(ranked[dropped:], minlength=experts).view(RANKS, -1)
    incoming = counts.cpu()
    ranks, local = incoming.shape
    owner = torch.arange(local).repeat(ranks).repeat_interleave(incoming.flatten())
    return order[dropped:], owner.argsort(stable=True).to(flat.device)


def on_the_device(chosen: Tensor, kept: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Order as a step does it; rows that arrive stand in a buffer for as many as leave."""
    routes = sort_routes(chosen, kept, experts)
    incoming = routes.counts.view(RANKS, -1)
    return routes.order, arrival_order(incoming, routes.assignments, None, 0).order


def bench(tokens: int, experts: int, top_k: int, device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure both.

    Raises:
        ConfigError: a number that makes no routes, or a device that is not here.
    """
    if experts % RANKS or not 1 <= top_k <= experts or tokens < 1:
        text = f"saw {tokens} tokens, {experts} experts, top-k {top_k}, expected at least 1 token, a multiple"
        raise ConfigError(f"bench experts: {text} of {RANKS} experts and at most as many of them for a token")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device: saw cuda, which torch does not find here; use cpu")
    say(f"{tokens:,} tokens, {experts} experts, top {top_k}, {ROUNDS} rounds on {device}")
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(1, tokens, experts, generator=generator).to(device)
    chosen = scores.topk(top_k, dim=-1).indices
    kept = (torch.rand(chosen.shape, generator=generator) < 0.9).to(device)
    seconds: dict[Any, list[float]] = {on_the_host: [], on_the_device: []}
    for number in range(WARM + ROUNDS):
        for way, taken in seconds.items():
            began = time.perf_counter()
            way(chosen, kept, experts)
            if device == "cuda":
                torch.cuda.synchronize()
            if number >= WARM:
                taken.append(time.perf_counter() - began)
    before, after = (1e3 * min(taken) for taken in seconds.values())
    return {
        "machine": machine(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "tokens": tokens,
        "experts": experts,
        "top_k": top_k,
        "host_ms": before,
        "device_ms": after,
        "ratio": after / before,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Report of the bench, as people read it."""
    return [
        f"order of {found['tokens']:,} tokens' rows, {found['experts']} experts, top {found['top_k']},"
        f" on {found['device']}, {machine_line(found)}",
        f"by counts on the host   {found['host_ms']:.2f} ms",
        f"on the device           {found['device_ms']:.2f} ms, {found['ratio']:.2f} times as long",
    ]
