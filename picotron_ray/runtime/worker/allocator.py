"""Strategy of torch's CUDA allocator in this process, chosen before its first allocation."""

from __future__ import annotations

import torch

from picotron_ray.config.support.memory import ALLOCATOR_OPTIONS


def choose_allocator(strategy: str) -> None:
    """Set the options of ``memory.allocator``; ``auto`` leaves those of torch's environment variable."""
    options = ALLOCATOR_OPTIONS[strategy]
    if options:
        torch._C._accelerator_setAllocatorSettings(options)
