"""Time that a step waits for communication, on the time line of its device.

On a CPU a wait is the processor's. On CUDA a call returns at once and the stream waits: the time between two
events on it, one on each side of the call. They are read once the step has come to its end, where losses and
norms have been waited for anyway, so that nothing waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ExposedTime:
    """Sum of the waits of a step.

    Args:
        device: whose time line counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Begin a step."""
        self._seconds = 0.0
        self._events.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what the body takes."""
        if self._cuda:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
            return
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """Seconds since `begin`; on CUDA it waits for the last event."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(first.elapsed_time(last) for first, last in self._events) / 1e3
            self._events.clear()
        return self._seconds
