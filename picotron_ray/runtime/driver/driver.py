"""The driver: resolves a job, starts or attaches to its run, shows it, and answers with an exit code.

It owns nothing. Order matters: a run that goes on is attached to before anything is checked or cleaned,
since its slots are in use; where none goes on, everything that can be refused is refused before Ray is
started. The handlers of signals are set again after ``ray.init``: it sets its own.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from picotron_ray.config.resume import check_resume
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.runtime.driver import console as report
from picotron_ray.runtime.driver import launch_mark, submission, waiting
from picotron_ray.runtime.driver.consent import NOT_ASKED, Consent
from picotron_ray.runtime.driver.console import ProgressView, summary_lines
from picotron_ray.runtime.driver.ended_run import stored_end
from picotron_ray.runtime.driver.follow_run import (
    ALL_SEEN,
    DETACHED,
    POLL_S,
    Signals,
    StoppedEarlyError,
    ask,
    find_coordinator,
    follow,
    poll,
    signal_handlers,
    take_down,
    without_rays_messages,
)
from picotron_ray.runtime.driver.resolve_job import (
    FROM_WORDS,
    INIT_FROM,
    ON_THE_CLUSTER,
    OWN_RAY,
    ResolvedJob,
    check_machine,
    resolve,
    resolve_words,
)
from picotron_ray.runtime.driver.submission import Submission
from picotron_ray.runtime.ray_cluster import connect, local_ray, supervisor
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, coordinator_name, event_folder

START_S = 30.0
"""Longest wait for the first answer of a coordinator that was just started."""


def drive(
    source: str,
    overrides: Sequence[str] = (),
    *,
    as_json: bool = False,
    detach: bool = False,
    take_over: bool = False,
    begin_anew: bool = False,
    console: Console | None = None,
) -> int:
    """Run a job, or attach to the run of its name; returns the exit code of the run.

    Args:
        source: a config's file or a recipe's name, resolved as ``config.load.load_job`` does.
        overrides: words ``key=value``.
        as_json: progress goes to stderr, and stdout carries the summary as its last line.
        detach: return 0 as soon as the run is on its way.
        take_over: end a run of that name that goes on where this process cannot ask it.
        begin_anew: begin at step 0 where storage lacks a run of that name that this machine remembers.

    Raises:
        ConfigError, StorageError, ClusterError, LocalRayError: nothing was started.
        LostRunError: the coordinator stays unreachable.
    """
    console = console or report.console(as_json)
    found = submission.current()
    say = _said_on(console)
    words = resolve_words(source, overrides, (), found, say)
    with contextlib.ExitStack() as marked:
        marked.enter_context(launch_mark.held(words.job.name))
        with waiting.told(say, "the checks of config, data and storage"):
            words = replace(words, consent=Consent(take_over, begin_anew, say=say))
            asked = resolve(words, (*FROM_WORDS, OWN_RAY))
        with without_rays_messages():
            code, summary = _drive(asked, detach, console, marked.close)
    if found is not None:  # of a job that was stopped, Ray keeps no exit code
        say(f"Ray job {found.id}: the driver exits with code {code}")
    if as_json and summary is not None:
        print(json.dumps(summary), flush=True)
    return code


def _said_on(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, markup=False, soft_wrap=True)


def _drive(
    asked: ResolvedJob, detach: bool, console: Console, started: Callable[[], None] = lambda: None
) -> tuple[int, dict[str, Any] | None]:
    """Start the run or attach to it, follow it to its end; ``started`` hears once it has a coordinator."""
    job = asked.job
    with signal_handlers(_before(job.name)) as signals:  # before the run exists: no request to stop is lost
        local = _connected(asked, console, signals.note, begins=False)
        with waiting.told(_said_on(console), "the coordinator"):
            coordinator, attached = _coordinator(asked, local, console, signals)
        started()
        if detach:
            console.print(f"run {job.name} goes on; `picotron-ray status {job.name}` shows it", markup=False)
            return 0, None
        with ProgressView(console) as progress:
            final = follow(
                job.name,
                coordinator,
                progress,
                signals,
                asked.submission,
                local=local,
                ended=partial(stored_end, job),
                attached=attached,
            )
    if final is None:
        console.print(f"left running; `picotron-ray stop {job.name}` stops it", markup=False)
        return DETACHED, None
    for line in summary_lines(final["summary"]):
        console.print(line, markup=False, soft_wrap=True)
    if not final.get("gone"):  # else its Ray may be too, of which nothing is to be asked
        take_down(local, coordinator)
    return int(final["exit_code"]), final["summary"]


def prepare(
    job: JobConfig, console: Console, relative_url: str = "", consent: Consent = NOT_ASKED
) -> tuple[LocalRay | None, ResolvedJob]:
    """Connect to the Ray that holds the run; where it must be started, check everything before.

    Args:
        relative_url, consent: as `ResolvedJob` has them.

    Returns that Ray, None for a cluster, and the job as it was checked, with what was found.
    """
    asked = resolve(ResolvedJob(job, relative_url=relative_url, consent=consent), (OWN_RAY,))
    return _connected(asked, console), asked


def _before(run: str) -> str:
    return f"run {run}: stopped by request before anything was started"


def _connected(
    asked: ResolvedJob, console: Console, connected: Callable[[], None] = lambda: None, begins: bool = True
) -> LocalRay | None:
    """Connect to the Ray that holds the run, or to one that is started for it; returns a local one.

    ``connected`` and ``begins`` are as `connect` has them.
    """
    say = _said_on(console)
    if asked.owns_ray:
        _note(asked.notes, console)
        where = f"checkpoints go to {asked.job.storage.url}"
        line = f"run {asked.job.name}: starting a Ray on this machine; {where}"
        say(line)
    began = time.monotonic()
    with waiting.told(say, "Ray"):
        local = connect.connect(asked.job, connected, begins)
    if asked.owns_ray:
        say(f"run {asked.job.name}: Ray is up ({time.monotonic() - began:.1f} s); starting its coordinator")
    return local


def _note(lines: Iterable[str], console: Console) -> None:
    for line in lines:
        console.print(f"note: {line}", style="yellow", markup=False, soft_wrap=True)


def _coordinator(
    asked: ResolvedJob, local: LocalRay | None, console: Console, signals: Signals
) -> tuple[Any, bool]:
    """Handle of the run's coordinator, and whether it went on before.

    A local Ray that was started for nothing is taken down again.
    """
    job = asked.job
    coordinator = _going_on(job.name, local)
    attached = coordinator is not None
    if attached:
        console.print(f"attached to run {job.name}, which goes on with the config it has", markup=False)
    else:
        coordinator = _start(asked, local, console, signals)
    _note(_differences(job, coordinator), console)
    return coordinator, attached


def _start(asked: ResolvedJob, local: LocalRay | None, console: Console, signals: Signals) -> Any:
    job, follows = asked.job, asked.follows
    try:
        if local is None:
            user = asked.consent._replace(stopped=lambda: signals.asked > 0)
            checked = check_machine(job, False, asked.relative_url, user)
            _note(checked.notes, console)
            job, follows = checked.job, checked.follows
        if signals.asked:
            raise StoppedEarlyError(_before(job.name))
        coordinator, _ = ensure_coordinator(job, local is not None, asked.submission, follows=follows)
        if local is not None:
            local_ray.begin(local)
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
    theirs = ask(coordinator, "config")
    if theirs is None:
        return []
    lines = check_resume(theirs, resolve(ResolvedJob(job), (INIT_FROM,)).job)
    return [f"{line}, once the run is stopped and launched again" for line in lines]


def ensure_coordinator(
    job: JobConfig,
    owns_ray: bool = False,
    submission: Submission | None = None,
    tied_to: dict[str, Any] | None = None,
    follows: int | None = None,
) -> tuple[Any, bool]:
    """Attach to the run's coordinator, or start one; returns (handle, attached).

    Two calls at once end with one coordinator: Ray keeps names unique. It runs on the head,
    wherever the driver is: there it outlives the nodes that come and go.

    Args:
        owns_ray: the connected Ray was started for this run alone and goes down with it.
        submission: the Ray job that starts the run.
        tied_to: the process (``ray_cluster.owner_process``) with which a new run ends; None: it outlives all
            drivers.
        follows: newest term of the run that is known to be over, as `ResolvedJob` has it.
    """
    found = find_coordinator(job.name)
    if found is not None:
        return found, True
    resolved = resolve(ResolvedJob(job, owns_ray=owns_ray), ON_THE_CLUSTER)
    import ray

    from picotron_ray.runtime.coordinator.actor import Coordinator
    from picotron_ray.runtime.ray_cluster.placement import ON_HEAD

    options = {
        "name": coordinator_name(job.name),
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": 32,
        "resources": ON_HEAD,
        "scheduling_strategy": "DEFAULT",  # not in the placement group of a Tune trial that asks for it
    }
    actor: Any = ray.remote(Coordinator).options(**options)
    settings = {
        "event_folder": str(event_folder(job.name)),
        "owns_ray": owns_ray,
        "origin": resolved.start,
        "submission": submission.plain() if submission else None,
        "tied_to": tied_to,
        "notes": list(resolved.notes),
        "slot_bytes": resolved.slot_bytes,
        "launch": uuid.uuid4().hex,
        "launched_s": time.time(),
        "follows": follows,
        "data": resolved.data.fingerprint if resolved.data else "",
    }
    return actor.remote(resolved.job.model_dump(mode="json"), settings), False
