"""Refusal to take over a run that goes on where this process does not see it, and the wait that shows it.

A coordinator that is not on this machine, nor in the connected Ray, shows in storage alone
(``run_storage.life_sign``). A launch that finds its sign waits for the next one, which refuses the launch, or
until it was silent for long enough to be dead. So no living run is ended unasked, and after a crash of
everything a launch elsewhere waits no longer than that.

The age of the sign found, by storage's clock, shortens that wait, but two signs' time is watched always, by
this machine's clock: storage's may be of the machine that writes (some shared file systems), and storage that
was away for long kept the signs from all who looked.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver.consent import NOT_ASKED, Consent, Options
from picotron_ray.runtime.driver.waiting import LINE_S
from picotron_ray.runtime.run_storage.life_sign import LIFE_S, SILENT_S, Life, newest_life, newest_term

log = logging.getLogger(__name__)
POLL_S = 2.0
WATCHED_S = 2 * LIFE_S
"""Least time for which a sign is watched before it is called the last one."""


def await_silence(
    run: str,
    storage: Storage,
    user: Consent = NOT_ASKED,
    look: Callable[[Storage], Life | None] = newest_life,
    pause: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int | None:
    """Return once no coordinator of the run lives elsewhere, or the user wants no wait.

    Returns:
        The newest term of the run that is over; None where the user wants one that goes on to be ended.

    Raises:
        ConfigError: one does.
    """
    if user.take_over:
        return None
    over, told_s = newest_term(storage), float("inf")  # read first: what is claimed from now on is not over
    first = look(storage)
    if first is None:
        return over
    until_s = clock() + max(SILENT_S - first.age_s, WATCHED_S)
    found: Life | None = first
    while found is not None and (found.term, found.beat) == (first.term, first.beat):
        seen = found.seen_here()
        left_s = until_s - clock()
        if seen == "alive":
            raise ConfigError(_living(run, found, user.options))
        if seen == "dead" or left_s <= 0 or user.stopped():
            return found.term
        if told_s - left_s >= LINE_S:
            told_s = left_s
            user.say(_countdown(run, found, left_s))
        pause(min(POLL_S, left_s))
        found = look(storage)
    if found is not None and found.seen_here() != "dead":
        raise ConfigError(_living(run, found, user.options))
    return max(over, first.term) if found is None else found.term


def _countdown(run: str, life: Life, left_s: float) -> str:
    return (
        f"run {run} may go on elsewhere: {life.where} was last heard {life.age_s:.0f} s ago (each"
        f" {LIFE_S:g} s, while it lives); silent for another {left_s:.0f} s, it is dead and"
        " this launch goes on"
    )


def _living(run: str, life: Life, options: Options) -> str:
    return (
        f"name: run {run!r} goes on elsewhere: {life.where} was last heard {life.age_s:.0f} s ago; to attach"
        f" to it launch {_there(life)}, or stop it there first; {options.take_over} ends it, with what it"
        " has not committed"
    )


def refuse_living(
    run: str,
    storage: Storage,
    look: Callable[[Storage], Life | None] = newest_life,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Return where no coordinator lives that a collection of garbage would fence.

    Raises:
        ConfigError: one may.
    """
    life = look(storage)
    seen = life.seen_here() if life is not None else "dead"
    if life is None or seen == "dead":
        return
    if seen or life.age_s < SILENT_S:
        raise ConfigError(_collecting(run, life, seen))
    log.warning(
        "watching for %g s whether %s, last heard %.0f s ago, is dead", WATCHED_S, life.where, life.age_s
    )
    pause(WATCHED_S)
    found = look(storage)
    if found is not None and (found.term, found.beat) != (life.term, life.beat):
        raise ConfigError(_collecting(run, found, "alive"))


def _collecting(run: str, life: Life, seen: str) -> str:
    silent = "" if seen else f" (wait {SILENT_S - life.age_s:.0f} s where it was killed)"
    return (
        f"run {run!r} goes on elsewhere and collects by itself: {life.where} was last heard"
        f" {life.age_s:.0f} s ago{silent}; stop it first {_there(life)}, or give --force, which ends it"
        " without a commit"
    )


def _there(life: Life) -> str:
    """Say where the run is to be reached from."""
    host, _, _ = life.address.rpartition(":")
    if host and host not in ("127.0.0.1", "localhost", "::1", "[::1]"):
        return f"with RAY_ADDRESS={life.address}"
    return f"on {life.machine.host}, as the user and with the XDG_STATE_HOME that it was launched with"
