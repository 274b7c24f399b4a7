"""CPU use of workers, which tells a slow one from a stuck one.

A node that is overloaded makes phases long, and that is no hang. A member that computes uses CPU; one that is
stopped, deadlocked or blocked in a collective does not. So a stall is not called while any member of its
generation on this node computes: the others may be waiting for that one. A process that spins for ever would
hide behind this, so patience ends at ``PATIENCE`` times the limit.

Waiting for a CUDA device takes a whole core and is no work. So a worker on such a device counts as at work in
a step's phases only while its page's ``progress`` moves.
"""

from __future__ import annotations

from picotron_ray.runtime.heartbeat import PageView, cpu_seconds
from picotron_ray.runtime.phase_limits import OUTSIDE

BUSY_SHARE = 0.05
"""Share of one core above which a process counts as computing; the collectives' threads stay below it."""
WINDOW_S = 0.4
"""CPU time is judged over at least this long: it is counted in ticks of 0.01 s."""
PATIENCE = 10.0


class CpuUse:
    """CPU use of a node's workers, measured while a stall is suspected."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[float, float, int]] = {}  # pid -> time, CPU seconds, progress when judged
        self._shares: dict[int, float] = {}

    def look(self, pages: list[PageView], now_s: float) -> None:
        """Measure; to be called at every look while a worker is stalled."""
        for page in pages:
            then_s, used_s, progress = self._seen.get(page.pid, (-1.0, 0.0, 0))
            if then_s < 0 or now_s - then_s > 5 * WINDOW_S:  # no recent measurement to compare with
                self._seen[page.pid] = (now_s, cpu_seconds(page.pid), page.progress)
                self._shares.pop(page.pid, None)
            elif now_s - then_s >= WINDOW_S:
                total_s = cpu_seconds(page.pid)
                share = (total_s - used_s) / (now_s - then_s)
                if page.spins and page.phase not in OUTSIDE:
                    share = float(page.progress != progress)
                self._shares[page.pid] = share
                self._seen[page.pid] = (now_s, total_s, page.progress)

    def excuses(self, page: PageView, pages: list[PageView], now_s: float) -> bool:
        """Whether the stall of ``page`` may be explained by work that goes on (or is not yet judged)."""
        if now_s - page.phase_since_s > PATIENCE * page.phase_limit_s:
            return False
        mates = [mate for mate in pages if (mate.term, mate.n) == (page.term, page.n)]
        return any(self._shares.get(mate.pid, 1.0) > BUSY_SHARE for mate in mates)
