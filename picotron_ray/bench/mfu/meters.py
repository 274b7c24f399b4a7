"""Clocks and memory of one process, on CPU and CUDA alike."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}
PRODUCTS = 3


class Clock:
    """Moments on the device's own time line, taken without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._moments: list[Any] = []

    def mark(self) -> None:
        if not self._cuda:
            self._moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._moments.append(event)

    def intervals(self) -> list[float]:
        """Seconds from each moment to the next; waits for the last."""
        pairs = zip(self._moments, self._moments[1:], strict=False)
        if not self._cuda:
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


class Stopwatch:
    """Seconds of each phase; waits for the device wherever one begins, so it slows what it measures."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._phase, self._began = "", 0.0
        self.seconds: dict[str, float] = defaultdict(float)

    def mark(self, phase: str) -> None:
        """End the current phase and begin ``phase``."""
        if self._cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] += now - self._began
        self._phase, self._began = phase, now


@contextlib.contextmanager
def stages_timed(stopwatch: Stopwatch) -> Iterator[None]:
    """Mark torch's pipeline stages ``forward`` and ``backward``, inside, and the time between ``bubble``.

    A stage computes a micro-batch in these methods, after it has received its input and before it sends.
    """
    from torch.distributed.pipelining import PipelineStage  # takes a second

    phases = {
        "forward_one_chunk": "forward",
        "backward_one_chunk": "backward",
        "backward_weight_one_chunk": "backward",
    }

    def timed(method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            stopwatch.mark(phase)
            try:
                return method(*arguments, **named)
            finally:
                stopwatch.mark("bubble")

        return call

    for name, phase in phases.items():
        setattr(PipelineStage, name, timed(getattr(PipelineStage, name), phase))
    try:
        yield
    finally:
        for name in phases:
            delattr(PipelineStage, name)  # inherited again


def reset_peak(device: torch.device) -> None:
    """Forget the highest memory use so far, after giving back what is free."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(AttributeError):  # a libc other than glibc
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets VmHWM


def peak_bytes(device: torch.device) -> int:
    """Peak memory since `reset_peak`: CUDA memory allocated, or resident memory of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status: no line VmHWM")


def product_flops(device: torch.device, precision: str) -> float:
    """FLOP/s of the fastest of a few square matrix products in ``precision``."""
    size = PRODUCT_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device).to(DTYPES[precision]) for _ in range(2))
    clock = Clock(device)
    for _ in range(PRODUCTS + 1):  # the first interval warms up
        clock.mark()
        left @ right
    clock.mark()
    return 2 * size**3 / min(clock.intervals()[1:])
