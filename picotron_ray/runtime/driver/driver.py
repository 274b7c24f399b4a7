"""The driver: checks, starts or attaches to a run, shows it, and answers with an exit code. It owns nothing.

Order matters: a run that goes on is attached to before anything is checked or cleaned, since its slots are
in use; where none goes on, everything that can be refused is refused before Ray is started. SIGINT and
SIGTERM ask the coordinator to stop with a commit; a second SIGINT leaves the run alone. The handlers are
set after ``ray.init``: earlier ones never fire.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from rich.console import Console

from picotron_ray.config.resume import check_resume
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError
from picotron_ray.runtime.driver import console as report
from picotron_ray.runtime.driver import submission
from picotron_ray.runtime.driver.console import Progress, summary_lines
from picotron_ray.runtime.driver.custom_model import with_built_model
from picotron_ray.runtime.driver.submission import Submission
from picotron_ray.runtime.ray_cluster import cleanup, connect, local_ray, supervisor
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay

POLL_S = 0.5
SILENCE_S = 120.0
"""A coordinator that does not answer for this long is given up by the driver (not by the run)."""
DETACHED = 1
"""Exit code of a driver that was told twice to go, or lost its run: the run's end is not known."""


START_S = 30.0
ME = uuid.uuid4().hex
"""This process among those that follow a run."""
"""Longest wait for the first answer of a coordinator that was just started."""
ALL_SEEN = 1 << 62
"""Number of an event that no run reaches: a poll without events."""


class StoppedEarlyError(PicotronError):
    """A request to stop came before there was anything to stop."""

    exit_code = 130


class LostRunError(PicotronError):
    """The coordinator cannot be reached any more; the run may still go on."""

    exit_code = DETACHED


@dataclass(slots=True)
class Signals:
    """What the user asked for by signal."""

    asked: int = 0
    detach: bool = False
    _told: bool = field(default=False)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.detach = self.detach or (self.asked > 0 and number == signal.SIGINT)
        self.asked += 1

    def news(self) -> bool:
        """Whether a first signal came that was not yet acted on."""
        fresh, self._told = self.asked > 0 and not self._told, self.asked > 0
        return fresh


@contextlib.contextmanager
def signal_handlers() -> Iterator[Signals]:
    """SIGINT and SIGTERM are noted instead of raised."""
    signals = Signals()
    before = {number: signal.signal(number, signals) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def without_rays_messages() -> Iterator[None]:
    """Drop what Ray prints on the driver's stdout when a worker dies, whatever ``log_to_driver`` says.

    That is half a page of guesses at the cause; the coordinator says in one line what happened, and stdout
    may have to be JSON. Consoles stay as they are: they are bound to their stream.
    """
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        yield


def drive(
    job: JobConfig, *, as_json: bool = False, detach: bool = False, console: Console | None = None
) -> int:
    """Run a job, or attach to the run of its name; returns the exit code of the run.

    With ``as_json`` progress goes to stderr and stdout carries the summary as its last line. With
    ``detach`` this returns 0 as soon as the run is on its way.

    Raises:
        ConfigError, StorageError, ClusterError, LocalRayError: nothing was started.
        LostRunError: the coordinator stays unreachable.
    """
    console = console or report.console(as_json)
    found = submission.current()
    if found is not None:
        console.print(f"run {job.name} in {found}", markup=False, soft_wrap=True)
    job = submission.with_user_paths(job, found)
    job = with_built_model(job, lambda line: console.print(line, markup=False))
    with without_rays_messages():
        code, summary = _drive(job, found, detach, console)
    if found is not None:  # of a job that was stopped, Ray keeps no exit code
        console.print(f"Ray job {found.id}: the driver exits with code {code}", markup=False)
    if as_json and summary is not None:
        print(json.dumps(summary), flush=True)
    return code


def _drive(
    job: JobConfig, ray_job: Submission | None, detach: bool, console: Console
) -> tuple[int, dict[str, Any] | None]:
    local = prepare(job, console)
    with signal_handlers() as signals:  # before the run exists: from here on no request to stop is lost
        coordinator = _coordinator(job, local, console, ray_job, signals)
        if detach:
            console.print(f"run {job.name} goes on; `picotron-ray status {job.name}` shows it", markup=False)
            return 0, None
        with Progress(console) as progress:
            final = follow(job.name, coordinator, progress, signals, ray_job)
    if final is None:
        console.print(f"left running; `picotron-ray stop {job.name}` stops it", markup=False)
        return DETACHED, None
    for line in summary_lines(final["summary"]):
        console.print(line, markup=False, soft_wrap=True)
    take_down(local, coordinator)
    return int(final["exit_code"]), final["summary"]


def prepare(job: JobConfig, console: Console) -> LocalRay | None:
    """Connect to the Ray that holds the run; where it must be started, check everything before."""
    if not os.environ.get("RAY_ADDRESS"):
        with local_ray.locked(job.name):
            found = local_ray.find(job.name)
            if found is None or not found.alive:
                cleanup.clear(job, found)
                _check(job, console)
    return connect.connect(job)


def _check(job: JobConfig, console: Console) -> None:
    from picotron_ray.runtime.driver.preflight import check

    for warning in check(job):
        console.print(f"note: {warning}", style="yellow", markup=False, soft_wrap=True)


def _coordinator(
    job: JobConfig, local: LocalRay | None, console: Console, ray_job: Submission | None, signals: Signals
) -> Any:
    """Handle of the run's coordinator; a local Ray that was started for nothing is taken down again."""
    coordinator = _going_on(job.name, local)
    if coordinator is not None:
        console.print(f"attached to run {job.name}, which goes on with the config it has", markup=False)
    else:
        coordinator = _start(job, local, console, ray_job, signals)
    for line in _differences(job, coordinator):
        console.print(f"note: {line}", style="yellow", markup=False, soft_wrap=True)
    return coordinator


def _start(
    job: JobConfig, local: LocalRay | None, console: Console, ray_job: Submission | None, signals: Signals
) -> Any:
    from picotron_ray.runtime.driver import preflight as run

    try:
        if local is None:
            _check(job, console)
        if signals.asked:
            raise StoppedEarlyError(f"run {job.name}: stopped by request before anything was started")
        coordinator, _ = run.ensure_coordinator(job, local is not None, ray_job)
    except BaseException:
        take_down(local)
        raise
    deadline = time.monotonic() + START_S
    while not signals.asked and time.monotonic() < deadline:
        if poll(coordinator, ALL_SEEN, 1.0) is not None:
            break
    return coordinator


def _going_on(run_name: str, local: LocalRay | None) -> Any:
    """The run's coordinator, if it lives.

    On a cluster one that has ended, whose driver was killed, is waited for to go: its run can be resumed.
    On a local Ray everything goes with it, and until then it has a result to tell.
    """
    import ray

    from picotron_ray.runtime.driver.preflight import find_coordinator

    deadline = time.monotonic() + supervisor.LINGER_S + POLL_S
    while (found := find_coordinator(run_name)) is not None:
        status = None if local is not None else poll(found, ALL_SEEN)
        if status is None or not status["done"]:
            return found
        if time.monotonic() > deadline:
            ray.kill(found)
        time.sleep(POLL_S)
    return None


def _differences(job: JobConfig, coordinator: Any) -> list[str]:
    """One line per key in which a run that goes on differs from ``job``; none while it does not answer.

    Also after a start: of two launches at once, the other one's config may have won.

    Raises:
        ConfigError: it is another run, by its model, data or seed.
    """
    from picotron_ray.checkpoint.storage.open import open_storage
    from picotron_ray.runtime.run_storage.init_from import settle

    theirs = ask(coordinator, "config")
    if theirs is None:
        return []
    settled, _ = settle(job, open_storage(job.storage, job.name))
    lines = check_resume(theirs, settled)
    return [f"{line}, once the run is stopped and launched again" for line in lines]


def follow(
    run: str, coordinator: Any, progress: Progress, signals: Signals, ray_job: Submission | None = None
) -> dict[str, Any] | None:
    """Show the run until it is done; returns its last status, or None where the user left.

    Returns once all others that follow the run have heard of its end too: the caller then ends what they ask.
    """
    since, term, heard = 0, 0, time.monotonic()
    final: dict[str, Any] | None = None
    while not signals.detach:
        if signals.news():
            progress.say(
                "stopping at the next step, with a commit; interrupt again to leave it running instead"
            )
            _request(coordinator, "stop")
        status = poll(coordinator, since, follower=ME)
        if status is None:
            if final is not None:
                return final
            if time.monotonic() - heard > SILENCE_S:
                raise LostRunError(
                    f"the coordinator of run {run} has not answered for {SILENCE_S:g} s; look at"
                    f" `picotron-ray logs {run}`, launch again to attach, or stop it"
                )
        else:
            heard = time.monotonic()
            if status["term"] != term:  # a restarted coordinator numbers its events anew
                term, asked = status["term"], since
                since = 0
                if ray_job is not None:
                    coordinator.attached.remote(ray_job.plain())
                if asked:
                    continue
            since = max((event["seq"] for event in status["events"]), default=since)
            progress.show(status)
            final = status if status["done"] else None
            if final is not None and not final["waiting"]:
                return final
        time.sleep(POLL_S)
    return None


def poll(coordinator: Any, since: int, timeout_s: float = 10.0, follower: str = "") -> dict[str, Any] | None:
    """The coordinator's status; None while it does not answer (it may be restarting)."""
    return ask(coordinator, "status", since, follower, timeout_s=timeout_s)


def ask(coordinator: Any, method: str, *arguments: Any, timeout_s: float = 10.0) -> dict[str, Any] | None:
    """What a method of the coordinator answers; None while it does not."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        found: dict[str, Any] = ray.get(getattr(coordinator, method).remote(*arguments), timeout=timeout_s)
    except (RayActorError, GetTimeoutError):
        return None
    return found


def _request(coordinator: Any, what: str) -> None:
    coordinator.request.remote(what)


def take_down(local: LocalRay | None, coordinator: Any = None) -> None:
    """End the coordinator of a run that is over, disconnect, and stop the Ray that was started for it."""
    import ray

    if coordinator is not None and local is None:
        ray.kill(coordinator)
    ray.shutdown()
    if local is not None:
        with local_ray.locked(local.run):
            local_ray.stop(local)
