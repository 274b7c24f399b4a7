"""Time that workers wait for a core, as the kernel counts it: what steps lose to other load."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

SAMPLE_S = 0.01
CHOICE_S = 0.5


class CoreWaits:
    """Watches the busiest thread of each process from a thread of its own; use it as a context."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._files = [_busiest(pid) for pid in pids]
        self._times: list[float] = []
        self._waited_s: list[list[float]] = [[] for _ in self._files]
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CoreWaits:
        self._sample()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        self._sample()

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        self._times.append(time.time())
        for file, waited_s in zip(self._files, self._waited_s, strict=True):
            waited_s.append(int(file.read_text().split()[1]) / 1e9)

    def between(self, start: float, end: float) -> float:
        """Seconds that the one which waited longest did so between two times since the epoch."""
        first = max(0, bisect.bisect_right(self._times, start) - 1)
        last = min(len(self._times) - 1, bisect.bisect_left(self._times, end))
        return max(waited_s[last] - waited_s[first] for waited_s in self._waited_s)


def _busiest(pid: int) -> Path:
    """Scheduler's statistics of the thread that computes."""

    def used() -> dict[Path, int]:
        return {
            file: int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")
        }

    before = used()
    time.sleep(CHOICE_S)
    after = used()
    return max(after, key=lambda file: after[file] - before.get(file, after[file]))
