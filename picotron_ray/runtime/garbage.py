"""Garbage collection of processes that answer in milliseconds: what stays is looked at once.

A full collection looks at all objects that live, and comes at any moment. Over what torch and Ray import, or
over what a coordinator knows of thousands of workers, it takes longer than a decision or a recovery may.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

OLDEST = 2
LOOK_EVERY_S = 3600.0
THRESHOLDS = 700, 10, 1000  # Python's own, but for the oldest: it is left to ``RareCollection``


def set_apart(generation: int = OLDEST, *, anew: bool = False) -> None:
    """Collect garbage, and have no later collection look at what is left.

    What is set apart is still freed once nothing refers to it; a cycle of objects alone is not. So it is
    called while all is calm. What was set apart before is not looked at again: the cost is that of what came
    since. But cycles that were set apart, and became garbage since, then stay for good.

    Args:
        generation: the oldest of the collector's generations to collect.
        anew: look at what was set apart before too.
    """
    if anew:
        gc.unfreeze()
    gc.collect(generation)
    gc.freeze()


class RareCollection:
    """Garbage collection of a coordinator, which may be asked to decide at any moment.

    Python looks at all that lives whenever it has grown by a quarter, so several times while a launch makes
    known what thousands of workers are, at up to 0.3 s each (measured at 16,384), and finds nothing: what a
    coordinator forgets is freed by its last reference. Here what came up is set apart unseen once all is
    calm, and everything is looked at once in ``LOOK_EVERY_S`` of such moments, for cycles that a library
    leaves behind.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._looked_at = clock, clock()

    def begin(self) -> None:
        """Set apart what was imported; have the collector look at what is young alone."""
        gc.set_threshold(*THRESHOLDS)
        set_apart()
        self._looked_at = self._clock()

    def calm(self) -> None:
        """Set apart what came since, in no time; where the last look is long ago, look at everything."""
        if self._clock() - self._looked_at < LOOK_EVERY_S:
            gc.freeze()
            return
        set_apart(anew=True)
        self._looked_at = self._clock()
