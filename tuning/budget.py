"""The budget of a study: worker hours and wall time, over all its launches.

One object is both Ray Tune's stopper and its callback: a callback hears of trials that fail without a
report, and Tune keeps its state with the experiment. When Tune restores an experiment it unpickles a stopper
of its own, beside the callback: that is the process's present budget, whatever was pickled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ray.tune import Callback, Stopper
from ray.tune.stopper import NoopStopper

from tuning.spaces import LAYOUT
from tuning.study_options import StudyOptions

_PRESENT: list[Stopper] = []


def present() -> Stopper:
    """The budget that this process made last."""
    return _PRESENT[0] if _PRESENT else NoopStopper()


class StudyBudget(Stopper, Callback):
    """Ends the experiment when its wall time or its workers' hours are spent.

    Args:
        workers: of the layouts, by name.
        most_workers: of a trial whose point names no layout.
        concurrent: trials whose workers compute at once; others wait for a place.
    """

    def __init__(
        self, options: StudyOptions, workers: Mapping[str, int], most_workers: int, concurrent: int
    ) -> None:
        self._workers, self._most_workers, self._concurrent = dict(workers), most_workers, concurrent
        self._most_worker_s = (options.gpu_hours or float("inf")) * 3600
        self._most_s = options.wall_s or float("inf")
        self._worker_s = self._wall_s = 0.0
        self._seen: float | None = None  # monotonic, of this process
        _PRESENT[:] = [self]

    def __reduce__(self) -> tuple[Callable[[], Stopper], tuple[()]]:
        return present, ()

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        """Whether nothing is left."""
        return self._worker_s >= self._most_worker_s or self._wall_s >= self._most_s

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Book the seconds since the last call to the trials that train."""
        now = time.monotonic()
        since_s, self._seen = 0.0 if self._seen is None else now - self._seen, now
        running = sorted(
            self._workers.get(trial.config.get(LAYOUT), self._most_workers)
            for trial in trials
            if trial.status == "RUNNING"
        )
        self._wall_s += since_s
        self._worker_s += since_s * sum(running[-self._concurrent :])

    def get_state(self) -> dict[str, Any]:
        """Seconds spent, which Tune keeps with the experiment."""
        return {"worker_s": self._worker_s, "wall_s": self._wall_s}

    def set_state(self, state: dict[str, Any]) -> None:
        self._worker_s, self._wall_s = state["worker_s"], state["wall_s"]
