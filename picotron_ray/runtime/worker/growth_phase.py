"""Growth of snapshot slots as a phase of its own: touching memory takes minutes where a state is large."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from picotron_ray.runtime.heartbeat import Page


@contextmanager
def growth_phase(page: Page) -> Iterator[Callable[[], None]]:
    """Enter the phase ``grow``, and go back to the phase before; yields what says that it moves."""
    before = page.name
    page.phase("grow")
    try:
        yield page.moved
    finally:
        page.phase(before)
