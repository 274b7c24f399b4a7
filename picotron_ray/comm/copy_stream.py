"""Copies between the device and host memory, beside the device's own work."""

from __future__ import annotations

import torch
from torch import Tensor


def host_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Flat host tensor, page-locked for CUDA so that copies can run beside kernels."""
    return torch.zeros(count, dtype=dtype, pin_memory=device.type == "cuda")


def host_like(tensor: Tensor) -> Tensor:
    """Host tensor of a device tensor's shape and, where it has no holes, strides; page-locked for CUDA."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


class CopyStream:
    """Stream of copies in one direction, in order. Without CUDA each copy is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Start a copy of what the device has computed until now; the event says when it is done.

        Both must stay alive until `follow` or the event's ``synchronize``.
        """
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def follow(self, event: torch.cuda.Event | None) -> None:
        """Make work queued from now on wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)
