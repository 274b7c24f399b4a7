"""Growth and locking of snapshot slots as a phase: touching memory takes minutes where a state is large."""

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


def lock_slots(
    page: Page,
    device: str,
    lock: Callable[[], None],
    wait_for_all: Callable[[str, Callable[[], None]], None],
    leave_if_asked: Callable[[], None],
) -> None:
    """Lock slots' pages before the first step of any rank, where a device writes into them.

    Other ranks wait, in the phase ``grow``: the driver may hold up their launches meanwhile, and a step would
    count as a hang.

    Args:
        device: its type; those of all ranks are of one.
        wait_for_all: see `ProcessGroups`.
        leave_if_asked: raises where this member is to leave its generation.
    """
    lock()
    if device != "cuda":
        return
    with growth_phase(page) as moved:

        def go_on() -> None:
            leave_if_asked()
            moved()

        wait_for_all("slots", go_on)
