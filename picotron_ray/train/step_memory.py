"""The loop's side of memory management: who takes a step may look at what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class StepMemory:
    """Takes steps and watches nothing."""

    def step(self, step: int, take: Callable[[], T]) -> T:
        """Take step number ``step``; return what ``take`` returned.

        Raises:
            torch.OutOfMemoryError: memory is such that the next steps will not fit.
        """
        return take()
