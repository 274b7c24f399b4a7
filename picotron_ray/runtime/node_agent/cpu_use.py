"""CPU use of workers, which tells a slow one from a stuck one.

A node that is overloaded makes phases long, and that is no hang. A member that computes uses CPU; one that is
stopped, deadlocked or blocked in a collective does not. So a stall is not called while any member of its
generation on this node computes: the others may be waiting for that one. A process that spins for ever would
hide behind this, so patience ends at ``PATIENCE`` times the limit.

To wait for a core is to be at work as well. Ray runs its workers at nice 15, so that beside a neighbour's
nice-0 process one gets 3 % of a core (weights of 36 and 1,024, sched(7)): the scheduler's count of the time
in which a thread was runnable tells it from a stuck one.

Waiting for a CUDA device takes a whole core and is no work. So a worker on such a device counts as at work in
a step's phases only while its page's ``progress`` moves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from picotron_ray.runtime.heartbeat import PageView, cpu_seconds
from picotron_ray.runtime.phase_limits import OUTSIDE

BUSY_SHARE = 0.05
"""Share of one core above which a process counts as computing; the collectives' threads stay below it."""
RUNNABLE_SHARE = 0.5
"""Share of the time in which a thread that computes runs or waits for a core; others' wake-ups stay below."""
WINDOW_S = 0.4
"""CPU time is judged over at least this long: it is counted in ticks of 0.01 s."""
PATIENCE = 10.0


def runnable_seconds(pid: int) -> dict[str, float]:
    """Seconds in which each thread of a process ran or waited for a core; those that are gone are missing."""
    found = {}
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            ran, waited, _ = file.read_text().split()
        except (OSError, ValueError):
            continue
        found[file.parent.name] = (int(ran) + int(waited)) / 1e9
    return found


@dataclass(frozen=True, slots=True)
class _Look:
    at_s: float
    used_s: float
    runnable_s: Mapping[str, float]
    progress: int

    @classmethod
    def of(cls, page: PageView, now_s: float) -> _Look:
        return cls(now_s, cpu_seconds(page.pid), runnable_seconds(page.pid), page.progress)

    def share_since(self, then: _Look, page: PageView) -> float:
        """Share of a core that a process used, or of the time that its busiest thread was runnable."""
        if page.spins and page.phase not in OUTSIDE:
            return float(self.progress != then.progress)
        lasted_s = self.at_s - then.at_s
        used = (self.used_s - then.used_s) / lasted_s
        before, after = then.runnable_s, self.runnable_s
        longest_s = max((after[thread] - before[thread] for thread in after.keys() & before), default=0.0)
        return max(used, longest_s / lasted_s) if longest_s > RUNNABLE_SHARE * lasted_s else used


class CpuUse:
    """CPU use of a node's workers, measured while a stall is suspected."""

    def __init__(self) -> None:
        self._seen: dict[int, _Look] = {}  # by pid, of when it was last judged
        self._shares: dict[int, float] = {}

    def look(self, pages: list[PageView], now_s: float) -> None:
        """Measure; to be called at every look while a worker is stalled."""
        for page in pages:
            then = self._seen.get(page.pid)
            if then is None or now_s - then.at_s > 5 * WINDOW_S:  # no recent measurement to compare with
                self._seen[page.pid] = _Look.of(page, now_s)
                self._shares.pop(page.pid, None)
            elif now_s - then.at_s >= WINDOW_S:
                self._seen[page.pid] = now = _Look.of(page, now_s)
                self._shares[page.pid] = now.share_since(then, page)

    def excuses(self, page: PageView, pages: list[PageView], now_s: float) -> bool:
        """Whether the stall of ``page`` may be explained by work that goes on (or is not yet judged)."""
        if now_s - page.phase_since_s > PATIENCE * page.phase_limit_s:
            return False
        mates = [mate for mate in pages if (mate.term, mate.n) == (page.term, page.n)]
        return any(self._shares.get(mate.pid, 1.0) > BUSY_SHARE for mate in mates)
