"""Runs of a study's trials in storage: whether another cluster drives them, and the room that they give back.

Of a trial that has ended its figures count. Its commits are deleted, or a study of 1,000 trials would keep
1,000 models. The trials of a population keep theirs, since others go on from them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from ray.tune import Callback
from rich.console import Console

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError
from picotron_ray.runtime.driver.consent import Consent
from picotron_ray.runtime.driver.elsewhere import await_silence
from picotron_ray.runtime.run_storage.life_sign import newest_life, this_space
from tuning.errors import StudyStorageError
from tuning.trial_rows import ENDED, row_of, storage_failed

log = logging.getLogger(__name__)
GIVEN_BACK = ("manifests/", "chunks/", "log/")
SUMMARY = "summary.json"
STOPS_S = 100.0
"""Longest wait for the last commit of a run whose trial was stopped (``ElasticTrainer``: 90 s)."""
POLL_S = 1.0
AT_ONCE = 1000
"""Objects that a storage deletes by one call."""


def runs_url(job: JobConfig, study: str) -> str:
    """Folder of the runs of a study's trials."""
    return f"{job.storage.url.rstrip('/')}/{study}/runs"


def run_name(study: str, trial_id: str) -> str:
    """Name of a trial's run."""
    return f"{study}.{trial_id}"


def storage_of(job: JobConfig, study: str, run: str) -> Storage:
    """Storage of a trial's run."""
    return open_storage(job.storage.model_copy(update={"url": runs_url(job, study)}), run)


def refuse_elsewhere(job: JobConfig, study: str, console: Console) -> None:
    """Return once no other machine drives trials of the study, by the signs of life of their runs.

    Raises:
        ConfigError: one does.
    """
    for run in _unfinished(open_storage(job.storage, study)):
        storage = storage_of(job, study, run)
        life = newest_life(storage)
        if life is not None and life.machine != this_space() and life.seen_here() != "dead":
            await_silence(run, storage, Consent(say=lambda line: console.print(line, markup=False)))


def _unfinished(storage: Storage) -> Iterator[str]:
    """Names of runs that left no summary."""
    begun: dict[str, bool] = {}
    for entry in storage.list("runs/"):
        run, _, key = entry.key.removeprefix("runs/").partition("/")
        begun[run] = begun.get(run, False) or key == SUMMARY
    return (run for run, ended in begun.items() if not ended)


class StorageWatch(Callback):
    """Callback that ends the experiment when storage fails a trial: the next ones would fare no better."""

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """
        Raises:
            StudyStorageError: storage is full or gone.
        """
        if storage_failed(trial):
            raise StudyStorageError(f"trial {trial.trial_id}: {row_of(trial)['reason']}")


class GivenBack(Callback):
    """Callback that deletes the commits of trials that have ended, on a thread of its own."""

    def __init__(self, job: JobConfig, study: str) -> None:
        self._job, self._study = job, study
        self._waiting: deque[tuple[str, float]] = deque()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __getstate__(self) -> None:
        """Keep nothing: a study that is resumed makes its callbacks anew."""

    def setup(self, *args: Any, **info: Any) -> None:
        self._thread = threading.Thread(target=self._work, name="given-back", daemon=True)
        self._thread.start()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._take(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._take(trial)

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        """Wait for what is left, as long as a run may take to stop."""
        self._over.set()
        if self._thread:
            self._thread.join(STOPS_S + POLL_S)

    def _take(self, trial: Any) -> None:
        if row_of(trial)["status"] in ENDED and not storage_failed(trial):
            self._waiting.append((run_name(self._study, trial.trial_id), time.monotonic() + STOPS_S))

    def _work(self) -> None:
        while self._waiting or not self._over.is_set():
            for _ in range(len(self._waiting)):
                run, until_s = self._waiting.popleft()
                try:
                    done = self._give_back(run, time.monotonic() > until_s)
                except PicotronError as error:  # the study goes on, and nothing but room is lost
                    log.warning("the commits of trial run %s are left in storage: %s", run, error)
                    done = True
                if not done:
                    self._waiting.append((run, until_s))
            self._over.wait(POLL_S)
            if self._over.is_set() and self._waiting:
                time.sleep(POLL_S)

    def _give_back(self, run: str, late: bool) -> bool:
        """Delete a run's commits, unless it has yet to end; returns whether nothing is left to do."""
        storage = storage_of(self._job, self._study, run)
        if not late and storage.size(SUMMARY) is None:
            return False
        for prefix in GIVEN_BACK:
            keys = [entry.key for entry in storage.list(prefix)]
            for at in range(0, len(keys), AT_ONCE):
                storage.delete_many(keys[at : at + AT_ONCE], time.monotonic() + STOPS_S)
        return True
