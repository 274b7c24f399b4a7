"""Planning ahead of need: which questions the next loss or the next node would put.

Asked are, besides the present number of workers: one to eight fewer, the fullest and the emptiest node fewer,
and one node more.
"""

from __future__ import annotations

from collections import Counter

from picotron_ray.coordinator.messages import LayoutQuestion
from picotron_ray.coordinator.policies.membership import Roster, first_of

MOST_LOST = 8


def questions_ahead(roster: Roster, least: int, most: int, grow: bool) -> list[LayoutQuestion]:
    """Questions in the order in which they are likely to be put; memory limits are left to the caller.

    Args:
        least, most: workers that a generation may have.
        grow: whether more than the present workers may be used.
    """
    alive = roster.alive()
    everyone, *fewer = roster.by_device(alive) or [[]]
    sizes = tuple(sorted(Counter(worker.node for worker in everyone).values(), reverse=True))
    device_bytes = roster.question(everyone, most).device_bytes
    ahead = [first_of(sizes, most), _without(sizes, 1), sizes[:-1], sizes[1:]]
    if grow and sizes:
        ahead.insert(2, tuple(sorted((*sizes, sizes[0]), reverse=True)))
    ahead += [_without(sizes, lost) for lost in range(2, MOST_LOST + 1)]
    found = [first_of(one, most) for one in ahead]
    questions = [LayoutQuestion(sum(one), one, device_bytes) for one in found]
    questions[1:1] = [roster.question(group, most) for group in fewer]
    return [question for question in dict.fromkeys(questions) if question.workers >= max(1, least)]


def _without(sizes: tuple[int, ...], lost: int) -> tuple[int, ...]:
    """Node sizes after workers of the emptiest nodes are lost."""
    return first_of(sizes, sum(sizes) - lost)
