"""Copies that come as late as CUDA allows: not before somebody waits for them."""

from __future__ import annotations

import torch
from torch import Tensor


class LateEvent:
    """Of one copy; in its stream, those before it are done first."""

    def __init__(self, stream: LateCopyStream, number: int) -> None:
        self.stream, self._number = stream, number

    def synchronize(self) -> None:
        self.stream.run(self._number)


class LateCopyStream:
    """Stands in for `CopyStream`: what is read, or written over, too early comes out wrong."""

    def __init__(self, device: torch.device) -> None:
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._done = 0

    def copy(self, target: Tensor, source: Tensor) -> LateEvent:
        if target.is_floating_point():
            target.fill_(float("nan"))
        self._waiting.append((target, source))
        return LateEvent(self, self._done + len(self._waiting))

    def follow(self, event: LateEvent | None) -> None:
        if event is not None:
            assert event.stream is self, "what follows a copy waits for the stream that made it"
            event.synchronize()

    def run(self, number: int) -> None:
        while self._done < number:
            target, source = self._waiting.pop(0)
            target.copy_(source)
            self._done += 1
