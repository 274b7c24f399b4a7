"""Numbers that leave a device in the background: nobody waits for what has long arrived."""

from __future__ import annotations

import torch
from torch import Tensor


class LateNumbers:
    """Numbers that go to the host in the background, and are read when they have long arrived."""

    def __init__(self, numbers: Tensor) -> None:
        self._event = None
        if numbers.device.type == "cuda":
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = numbers.clone()

    def arrived(self) -> Tensor:
        """Wait for the copy and nothing behind it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def read(self) -> list[list[float]]:
        """As `arrived`, as a list."""
        found: list[list[float]] = self.arrived().tolist()
        return found
