"""Time that a step waits for communication, on the time line of its device.

On a CPU a wait is the processor's. On CUDA a call returns at once and the stream waits: the time between two
events on it, one on each side of the call. They are read after the exchange that ends a step, which has
waited for the device anyway (`way_selection.Traveller.late`); before it where ways are chosen by them. The
next step takes them again.
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

    Fields:
        on: whether anything is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.on = True
        self._seconds = 0.0
        self._events: list[torch.cuda.Event] = []  # pairs, one after the other
        self._free: list[torch.cuda.Event] = []

    def begin(self) -> None:
        """Begin a step."""
        self._seconds = 0.0
        self._give_back()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what the body takes."""
        if not self.on:
            yield
        elif self._cuda:
            first = self._record()
            yield
            self._events += (first, self._record())
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """Seconds since `begin`; on CUDA it waits for the last event."""
        if self._events:
            self._events[-1].synchronize()
            pairs = zip(self._events[::2], self._events[1::2], strict=True)
            self._seconds += sum(first.elapsed_time(last) for first, last in pairs) / 1e3
            self._give_back()
        return self._seconds

    def _record(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _give_back(self) -> None:
        self._free += self._events
        self._events.clear()
