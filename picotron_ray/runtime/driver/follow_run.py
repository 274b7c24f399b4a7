"""Following a run from a driver: its status shown until its end, requests by signal, and taking Ray down.

SIGINT and SIGTERM ask the coordinator to stop with a commit; a second SIGINT leaves the run alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from picotron_ray.errors import PicotronError
from picotron_ray.runtime.coordinator.summary import REQUEUE
from picotron_ray.runtime.driver.console import ProgressView
from picotron_ray.runtime.driver.submission import Submission
from picotron_ray.runtime.ray_cluster import local_ray
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, coordinator_name

POLL_S = 0.5
SILENCE_S = 120.0
"""A coordinator that does not answer for this long is given up by the driver (not by the run)."""
DETACHED = 1
"""Exit code of a driver that was told twice to go, or lost its run: the run's end is not known."""
ALL_SEEN = 1 << 62
"""Number of an event that no run reaches: a poll without events."""
STOPPING = "stopping at the next step, with a commit; interrupt again to leave it running instead"
FOLLOWER = uuid.uuid4().hex
"""This process among those that follow a run."""


REQUEUING = "SIGUSR1: stopping at the next step, with a commit, to be launched again"


class StoppedEarlyError(PicotronError):
    """A request to stop came before there was anything to stop."""

    exit_code = 130


class RequeuedEarlyError(PicotronError):
    """SIGUSR1 came before there was anything to stop."""

    exit_code = REQUEUE


class LostRunError(PicotronError):
    """The coordinator cannot be reached any more; the run may still go on."""

    exit_code = DETACHED


STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclass(slots=True)
class Signals:
    """Requests of the user by signal.

    ``early``: what to say of one that comes before there is anything to ask: it is raised, as
    StoppedEarlyError, so that whatever is being started is taken down again.
    """

    asked: int = 0
    detach: bool = False
    requeue: bool = False  # SIGUSR1: who stops it launches it again
    early: str = ""
    _told: bool = field(default=False)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.early and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.early:
            raise (RequeuedEarlyError if number == signal.SIGUSR1 else StoppedEarlyError)(self.early)
        if number == signal.SIGUSR1:
            self.requeue = True
            return
        self.detach = self.detach or (self.asked > 0 and number == signal.SIGINT)
        self.asked += 1

    def note(self) -> None:
        """Note requests from here on; to be called after ``ray.init``, which sets handlers of its own."""
        self.early = ""
        for number in STOPS:
            signal.signal(number, self)
        if signal.getsignal(signal.SIGHUP) is self:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a closed terminal leaves the run alone

    def first_request(self) -> bool:
        """True once, for the first signal."""
        fresh, self._told = self.asked > 0 and not self._told, self.asked > 0
        return fresh


@contextlib.contextmanager
def signal_handlers(early: str = "") -> Iterator[Signals]:
    """Note SIGINT, SIGTERM and SIGUSR1 instead of raising them.

    Args:
        early: raise them, and SIGHUP, with these words until `Signals.note`.
    """
    signals = Signals(early=early)
    numbers = [*STOPS]
    if early and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # else nohup, or the caller, knows better
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, signals) for number in numbers}
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


def find_coordinator(run: str) -> Any:
    """The coordinator's handle of a run on the connected Ray cluster; None where none lives."""
    import ray

    try:
        return ray.get_actor(coordinator_name(run), NAMESPACE)
    except ValueError:
        return None


def follow(
    run: str,
    coordinator: Any,
    progress: ProgressView,
    signals: Signals,
    ray_job: Submission | None = None,
    stop: bool = False,
    local: LocalRay | None = None,
    ended: Callable[[int], dict[str, Any] | None] = lambda term: None,
    attached: bool = False,
) -> dict[str, Any] | None:
    """Show the run until it is done; returns its last status, or None where the user left.

    A stop, by signal or by ``stop``, is asked for until the coordinator's status says that it knows, also of
    one that is restarted meanwhile; so is one for a queue, by SIGUSR1.
    Returns once all others that follow the run have heard of its end too: the caller then ends what they ask.

    Args:
        local: the run's own Ray, where it has one.
        ended: end of a run that was heard of in that term, without a coordinator (`ended_run.stored_end`).
        attached: the run went on before, so that its events so far are old; else only those of earlier
            launches are.

    Raises:
        LostRunError: somebody ended the run or its Ray, or the coordinator stays silent.
    """
    since, term, heard, wish = 0, 0, time.monotonic(), "stop" if stop else ""
    final: dict[str, Any] | None = None
    while not signals.detach:
        wish = _pass_on(signals, progress, coordinator, wish)
        status = poll(coordinator, since, follower=FOLLOWER)
        if status is None:
            if final is not None:
                return final
            if is_gone(run, coordinator, local):
                return _end_of_lost(run, ended(term), progress, local)
            _refuse_silent(run, time.monotonic() - heard)
        else:
            heard = time.monotonic()
            if wish and not status["stopping"] and not status["done"]:
                _request(coordinator, wish)
            if status["term"] != term:
                asked = since
                since = since if status["continues"] else 0  # else it numbers its events anew
                since = since if term else max(since, _pass_over(run, status, attached, progress))
                term = status["term"]
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


def _pass_on(signals: Signals, progress: ProgressView, coordinator: Any, wish: str) -> str:
    """Ask for what signals say; returns the wish that holds: ``stop``, ``requeue``, or none."""
    if signals.first_request():
        progress.say(STOPPING)
        wish = "stop"
        _request(coordinator, wish)
    elif signals.requeue and not wish:
        progress.say(REQUEUING)
        wish = "requeue"
        _request(coordinator, wish)
    return wish


def _pass_over(run: str, status: dict[str, Any], attached: bool, progress: ProgressView) -> int:
    """Take events that are old to this process out of a status; returns the number of the newest."""
    newest = max((event["seq"] for event in status["events"]), default=0)
    until = newest if attached else status.get("recalled", 0)
    old = [event for event in status["events"] if event["seq"] <= until]
    status["events"] = status["events"][len(old) :]
    if old:
        progress.say(f"{len(old)} earlier events are shown by `picotron-ray status {run}`")
    return int(until)


def poll(coordinator: Any, since: int, timeout_s: float = 10.0, follower: str = "") -> dict[str, Any] | None:
    """The coordinator's status; None while it does not answer (it may be restarting)."""
    return ask(coordinator, "status", since, follower, timeout_s=timeout_s)


def ask(coordinator: Any, method: str, *arguments: Any, timeout_s: float = 10.0) -> dict[str, Any] | None:
    """Call a method of the coordinator; returns its answer, or None while there is none."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        found: dict[str, Any] = ray.get(getattr(coordinator, method).remote(*arguments), timeout=timeout_s)
    except (RayActorError, GetTimeoutError):
        return None
    return found


def tell(coordinator: Any, run: str, what: str, patience_s: float = 60.0) -> None:
    """Request a ``stop`` or a ``checkpoint``, again while the coordinator is being started again.

    Raises:
        LostRunError: nobody heard of it.
    """
    deadline = time.monotonic() + patience_s
    while not heard(coordinator, what):
        if time.monotonic() > deadline:
            raise LostRunError(
                f"the coordinator of run {run} does not answer: nobody heard of the {what}; see"
                f" `picotron-ray logs {run}`"
            )
        time.sleep(POLL_S)


def heard(coordinator: Any, what: str) -> bool:
    """Request something once; whether the coordinator has heard of it."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    try:
        ray.get(coordinator.request.remote(what), timeout=10.0)
    except (RayActorError, GetTimeoutError):
        return False
    return True


def _end_of_lost(
    run: str, end: dict[str, Any] | None, progress: ProgressView, local: LocalRay | None
) -> dict[str, Any]:
    """Return the end of a run whose coordinator is gone; raises LostRunError where it told none."""
    if end is None and local is not None and local.exit_status:
        raise LostRunError(
            f"the Ray of run {run} on this machine ended by itself (its head exited with"
            f" {local.exit_status}): one of its processes was killed, or memory ran out (`picotron-ray logs"
            f" {run}`); launch the run again to go on from its newest commit"
        )
    if end is None:
        raise LostRunError(
            f"run {run} was ended from outside, as `picotron-ray stop --now` does, and told no"
            " result; launch it again to go on from its newest commit"
        )
    progress.say(f"run {run} ended as {end['state']} while this process heard nothing of it")
    return end


def _refuse_silent(run: str, silent_s: float) -> None:
    """Raise LostRunError where a coordinator has been silent for too long."""
    if silent_s > SILENCE_S:
        raise LostRunError(
            f"the coordinator of run {run} has not answered for {SILENCE_S:g} s; look at"
            f" `picotron-ray logs {run}`, launch again to attach, or stop it"
        )


def is_gone(run: str, coordinator: Any, local: LocalRay | None) -> bool:
    """Whether a coordinator that does not answer never will: its Ray was ended, or it alone for good.

    Of a Ray that is gone nothing is asked: its client would wait for a minute, and then end this process.
    """
    if local is not None:
        return not local.running
    import ray
    from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

    try:
        ray.get(coordinator.pid.remote(), timeout=1.0)
    except ActorDiedError:
        return find_coordinator(run) is None
    except (RayActorError, GetTimeoutError):
        return False
    return False


def _request(coordinator: Any, what: str) -> None:
    coordinator.request.remote(what)


def disconnect() -> None:
    """Leave the connected Ray."""
    import ray

    ray.shutdown()


def take_down(local: LocalRay | None, coordinator: Any = None) -> None:
    """End the coordinator of a run that is over, disconnect, and stop the Ray that was started for it."""
    import ray

    if coordinator is not None and local is None:
        ray.kill(coordinator)
    ray.shutdown()
    if local is not None:
        with local_ray.locked(local.run):
            local_ray.stop(local)
