"""Tools that look at a run between its steps: a profiler, breakpoints. Here is what the loop knows of them.

A tool begins and ends at a boundary that all ranks agree on, by flags of the step's exchange
(`train.step_sync`). One rank that raises ``HOLD`` keeps all of them at the boundary.
"""

from __future__ import annotations

from collections.abc import Callable

FlagsOfAll = Callable[[], int]
"""Exchanges the flags of all ranks; returns them together."""


class StepTools:
    """Tools of one rank; these do nothing."""

    def begin(self, step: int) -> None:
        """Hear that a step begins."""

    def boundary(self, step: int, flags: int, flags_of_all: FlagsOfAll) -> None:
        """Hear that a step is over, its snapshot begun; may stay here as long as all ranks do.

        Args:
            flags: of the step's exchange.
        """
