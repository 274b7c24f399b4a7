"""Rates of one device: matrix products, attention, memory and a block's launches. Imports torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from picotron_ray.planner.hardware_profile import AttentionPoint, MatmulPoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
CPU_WIDTHS = (32, 64, 128, 256, 512, 1024)
GPU_WIDTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
ROWS = {"cpu": 512, "cuda": 8192}
LEAST_REPEATS, LEAST_S = 3, 0.02
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Budget:
    """Seconds that may still be spent; what it leaves out is named in ``cuts``."""

    until: float
    cuts: list[str] = field(default_factory=list)

    def allows(self, what: str) -> bool:
        """Whether there is time left; else ``what`` is noted as left out."""
        if time.monotonic() < self.until:
            return True
        self.cuts.append(f"left out: {what} (--budget-s)")
        return False


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of ``work`` after one warm-up, over at least `LEAST_REPEATS` and `LEAST_S`."""
    _timed(work, device)
    found: list[float] = []
    while len(found) < LEAST_REPEATS or sum(found) < LEAST_S:
        found.append(_timed(work, device))
    return median(found)


def _timed(work: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def matmul_points(device: torch.device, dtypes: list[str], budget: Budget) -> Iterator[MatmulPoint]:
    """Products of many rows with square matrices, from thin to wide."""
    for name in dtypes:
        for width in CPU_WIDTHS if device.type == "cpu" else GPU_WIDTHS:
            if not budget.allows(f"products of width {width} in {name}"):
                continue
            rows = ROWS[device.type]
            a = torch.randn(rows, width, device=device).to(DTYPES[name])
            b = torch.randn(width, width, device=device).to(DTYPES[name])
            seconds = seconds_of(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
            yield MatmulPoint(dtype=name, m=rows, n=width, k=width, flops_s=2 * rows * width**2 / seconds)


def attention_points(device: torch.device, dtypes: list[str], budget: Budget) -> Iterator[AttentionPoint]:
    """Causal attention of torch, forward and backward."""
    rows, heads, dim = (2, 4, 64) if device.type == "cpu" else (2, 16, 128)
    for name in dtypes:
        for sequence in (128, 512) if device.type == "cpu" else (2048, 8192):
            if not budget.allows(f"attention over {sequence} tokens in {name}"):
                continue
            shape = (rows, heads, sequence, dim)
            q, k, v = (
                torch.randn(shape, device=device, dtype=DTYPES[name], requires_grad=True) for _ in range(3)
            )
            parts = q, k, v

            def forward(parts: Heads = parts) -> torch.Tensor:
                q, k, v = parts
                return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            out = forward()
            ahead = torch.randn_like(out)
            there = seconds_of(forward, device)

            def backward(out: torch.Tensor = out, ahead: torch.Tensor = ahead, parts: Heads = parts) -> Any:
                return torch.autograd.grad(out, parts, ahead, retain_graph=True)

            back = seconds_of(backward, device)
            half = 4 * rows * heads * sequence**2 * dim / 2
            yield AttentionPoint(
                dtype=name, rows=rows, heads=heads, sequence=sequence, head_dim=dim,
                forward_flops_s=half / there, backward_flops_s=2.5 * half / back,
            )  # fmt: skip


def memory_bytes_s(device: torch.device) -> float:
    """Bytes that a sum of two arrays reads and writes per second, beyond what caches hold."""
    count = (64 if device.type == "cpu" else 1024) * 2**20 // 4
    a, b = torch.ones(count, device=device), torch.ones(count, device=device)
    return 3 * 4 * count / seconds_of(lambda: torch.add(a, b, out=a), device)


def host_bytes_s() -> float:
    """Bytes of host memory that one thread reads and writes per second."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return memory_bytes_s(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)


def host_link_bytes_s(device: torch.device) -> float:
    """Bytes per second from pinned host memory to the device; 0 on CPUs."""
    if device.type == "cpu":
        return 0.0
    here = torch.empty(256 * 2**20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=device)
    return here.numel() / seconds_of(lambda: there.copy_(here, non_blocking=True), device)


def block_s(device: torch.device) -> float:
    """Seconds of a decoder block on a few tokens, forward and backward: launches and framework alone."""
    block = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True, norm_first=True).to(device)
    tokens = torch.randn(1, 8, 64, device=device)

    def step() -> None:
        block(tokens).sum().backward()

    return seconds_of(step, device)
