"""``ElasticTrainer``: a run by Ray Train's conventions, in a script or inside a Ray Tune trainable.

``fit()`` uses the Ray that is initialised, else behaves like ``launch``: ``RAY_ADDRESS``, or a local Ray of
the run's own. Of one name there is one run: where it goes on, ``fit`` attaches to it; where it was
interrupted, it resumes from its newest commit. As Ray Train does, ``fit`` raises what ended a failed run.

Unlike a launched run, this one ends with the process that called ``fit`` (``ray_cluster.owner_process``): an
interrupt, an exception of a callback, Tune's stop of a trial and a kill all stop it with a commit and leave
no actor.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ray
from ray.train import BackendConfig, DataConfig
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2.api.config import RunConfig, ScalingConfig
from ray.train.v2.api.exceptions import ControllerError
from ray.train.v2.api.result import Result

from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.export import public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError
from picotron_ray.runtime.driver import console, driver, follow_run, launch_mark
from picotron_ray.runtime.driver.consent import PYTHON, Consent
from picotron_ray.runtime.driver.ended_run import stored_end
from picotron_ray.runtime.driver.resolve_job import FROM_WORDS, RUNNING_RUN, ResolvedJob, check_machine
from picotron_ray.runtime.driver.resolve_job import resolve as resolve_job
from picotron_ray.runtime.driver.submission import current
from picotron_ray.runtime.ray_cluster import owner_process
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay
from picotron_ray.runtime.ray_train.configs import Job, job_of
from picotron_ray.runtime.ray_train.result import CommitCheckpoint, result_of

STOP_S = 90.0
"""Longest wait for the commit of a run that is stopped because ``fit`` is left."""


class ElasticTrainer:
    """Trainer of a job on as many workers as there are, within bounds, by Ray Train's conventions.

    ``ray_train.configs`` lists the fields of Ray's configs that are applied; others are refused.

    Example:
        >>> import ray.train
        >>> from picotron_ray import ElasticTrainer
        >>> trainer = ElasticTrainer(
        ...     {"name": "elastic", "steps": 50, "cluster": {"device": "cpu"}},
        ...     scaling_config=ray.train.ScalingConfig(num_workers=(1, 4)),
        ... )
        >>> trainer.job.cluster.min_workers, trainer.job.cluster.max_workers
        (1, 4)
        >>> result = trainer.fit()  # doctest: +SKIP
        >>> result.metrics["loss"], result.checkpoint.tensors()  # doctest: +SKIP

    Args:
        job: a ``JobConfig``, plain data as YAML gives it, or the path of a YAML file or packaged recipe.
        scaling_config: ``ray.train.ScalingConfig``; ``num_workers=(min, max)`` makes it elastic.
        run_config: ``ray.train.RunConfig``. Its ``UserCallback`` objects are called in this process:
            ``after_report`` with figures and, where there is a new one, a commit; ``after_exception`` for
            every failure that the run survived or not.
        take_over: end a run of this name that goes on elsewhere, with what it has not committed, and go on
            from its newest commit; without it such a run is refused (``launch --take-over``).
        begin_anew: begin at step 0 where storage has nothing of a run of this name that this machine
            remembers; without it such a launch is refused (``launch --begin-anew``).

    Raises:
        ConfigError: one line per mistake, also for a field of Ray's configs that is not applied.
    """

    def __init__(
        self,
        job: Job,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        *,
        take_over: bool = False,
        begin_anew: bool = False,
    ) -> None:
        asked = ResolvedJob(job_of(job, scaling_config, run_config), submission=current())
        resolved = resolve_job(asked, FROM_WORDS)
        self.job, self._relative_url = resolved.job, resolved.relative_url
        cluster = self.job.cluster
        self.scaling_config = scaling_config or ScalingConfig(
            num_workers=(cluster.min_workers, cluster.max_workers), use_gpu=cluster.device == "cuda"
        )
        self.run_config = run_config or RunConfig(name=self.job.name)
        self._consent = Consent(take_over, begin_anew, PYTHON, _say)
        self._follows: int | None = None

    def fit(self) -> Result:
        """Train to the end; returns metrics, checkpoint and path as Ray's ``Result``.

        A run that was stopped from elsewhere (``picotron-ray stop``) returns too, with status ``stopped`` in
        its metrics.

        Raises:
            TrainingFailedError: the run failed; its attribute ``result`` holds what there is.
            ConfigError, StorageError, ClusterError: nothing was started.
            KeyboardInterrupt: after the run was stopped with a commit.
        """
        try:
            summary = self._train()
        except follow_run.LostRunError as error:
            raise ControllerError(error) from error
        result = result_of(self.job, summary)
        if result.error is not None:
            result.error.result = result  # type: ignore[attr-defined]
            raise result.error
        return result

    def _train(self) -> dict[str, Any]:
        """Connect, follow the run to its end, and leave nothing of it behind; returns the summary."""
        with contextlib.ExitStack() as marked:
            marked.enter_context(launch_mark.held(self.job.name))
            return self._to_the_end(marked.close)

    def _to_the_end(self, started: Callable[[], None]) -> dict[str, Any]:
        given = ray.is_initialized()
        local = None
        if not given:
            local, asked = driver.prepare(
                self.job, console.console(as_json=True), self._relative_url, self._consent
            )
            self.job, self._follows = asked.job, asked.follows
        coordinator: Any = None
        try:
            while True:
                coordinator, attached = self._start(local)
                started()
                status = self._follow(coordinator, local)
                if not (attached and status["state"] == "stopped"):
                    return dict(status["summary"])
                ray.kill(coordinator)  # of a process that is gone: this one takes the run up again
        finally:
            if given and coordinator is not None:
                with contextlib.suppress(ValueError):
                    ray.kill(coordinator)
            elif not given:
                follow_run.take_down(local, coordinator)

    def _start(self, local: LocalRay | None) -> tuple[Any, bool]:
        """The run's coordinator, and whether it goes on since before."""
        while (found := follow_run.find_coordinator(self.job.name)) is not None:
            status = follow_run.poll(found, 0)
            if status is None or not status["done"]:
                resolve_job(ResolvedJob(self.job), (RUNNING_RUN,))
                return found, True
            ray.kill(found)
            time.sleep(follow_run.POLL_S)
        if local is None:
            asked = check_machine(self.job, False, self._relative_url, self._consent)
            self.job, self._follows = asked.job, asked.follows
        return driver.ensure_coordinator(
            self.job,
            owns_ray=local is not None,
            tied_to=owner_process.this_process(),
            follows=self._follows,
        )

    def _follow(self, coordinator: Any, local: LocalRay | None) -> dict[str, Any]:
        """The run's last status. However this is left, the run has been stopped by then."""
        with _signals() as signals, _progress() as shown:
            watcher = _Watcher(self.job, self._context(), shown)
            try:
                ended = partial(stored_end, self.job)
                known = (self.job.name, coordinator, watcher, signals)
                final = follow_run.follow(*known, local=local, ended=ended)
            except BaseException:
                if not follow_run.is_gone(self.job.name, coordinator, local):
                    _stop(coordinator)
                raise
        if final is None or (signals.asked and final["state"] == "stopped"):
            raise KeyboardInterrupt
        return final

    def _context(self) -> TrainRunContext:
        return TrainRunContext(
            run_config=self.run_config,
            train_loop_config=public_dict(self.job),
            scaling_config=self.scaling_config,
            backend_config=BackendConfig(),
            dataset_config=DataConfig(),
        )


class _Watcher(console.ProgressView):
    """Display of statuses, if there is anybody to see them, that also calls the user's callbacks."""

    def __init__(self, job: JobConfig, context: TrainRunContext, shown: console.ProgressView | None) -> None:
        self._job, self._context, self._shown = job, context, shown
        self._reported: tuple[Any, ...] = (0, None, None)
        self._committed: int | None = None
        self._failures = 0
        self._ranks: dict[str, int] = {}

    def say(self, text: str, style: str = "") -> None:
        if self._shown:
            self._shown.say(text, style)

    def show(self, status: dict[str, Any]) -> None:
        """Take a new status."""
        if self._shown:
            self._shown.show(status)
        self._exceptions(status)
        news = (status["step"], status["eval_step"], status["committed"])
        if status["step"] and news != self._reported:
            self._reported = news
            self._report(status)

    def _report(self, status: dict[str, Any]) -> None:
        checkpoint = None
        if status["committed"] != self._committed:
            self._committed = status["committed"]
            checkpoint = _newest_checkpoint(self._job)
        metrics = figures(status)
        for callback in self._context.run_config.callbacks or ():
            callback.after_report(self._context, [dict(row) for row in metrics], checkpoint)

    def _exceptions(self, status: dict[str, Any]) -> None:
        for failure in status["failures"][self._failures :]:
            text = f"{failure['kind']} of {failure['target']} at step {failure['step']}"
            failed: dict[int, Exception] = {self._ranks.get(failure["target"], -1): PicotronError(text)}
            for callback in self._context.run_config.callbacks or ():
                callback.after_exception(self._context, failed)
        self._failures = len(status["failures"])
        self._ranks = {worker: rank for rank, worker in enumerate(status["members"])}


def _say(line: str) -> None:
    console.console(as_json=True).print(line, markup=False, soft_wrap=True)


def figures(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Figures for ``after_report``: a dict per worker by rank, with those of the whole run in each."""
    names = ("step", "loss", "eval_loss", "eval_step", "tokens_per_s")
    common = {name: status[name] for name in names if status[name] is not None}
    pages = [(worker, status["pages"].get(worker, {})) for worker in status["members"]]
    return [
        {**common, "rank": rank, "worker": worker, "step_time_s": page.get("step_time_s")}
        for rank, (worker, page) in enumerate(pages)
    ] or [common]


def _newest_checkpoint(job: JobConfig) -> CommitCheckpoint | None:
    log = RunLog(open_storage(job.storage, job.name))
    log.refresh()
    commits = log.commits()
    return CommitCheckpoint(job.storage, job.name, commits[-1].body) if commits else None


def _stop(coordinator: Any) -> None:
    """Stop with a commit and wait for it."""
    coordinator.request.remote("stop")
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        status = follow_run.poll(coordinator, 0)
        if status is not None and status["done"]:
            return
        time.sleep(follow_run.POLL_S)


@contextlib.contextmanager
def _signals() -> Iterator[follow_run.Signals]:
    """Note signals where this thread can: in others (Tune's) whoever runs them decides."""
    if threading.current_thread() is not threading.main_thread():
        yield follow_run.Signals()
        return
    with follow_run.signal_handlers() as signals:
        yield signals


@contextlib.contextmanager
def _progress() -> Iterator[console.ProgressView | None]:
    """Display as launch has it, on stderr; none in a thread of Tune's, which has a table of its own."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    with console.ProgressView(console.console(as_json=True)) as shown:
        yield shown
