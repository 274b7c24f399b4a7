"""Words of a command that needs a run which goes on, for one that has ended or died."""

from __future__ import annotations

import logging
import time

from picotron_ray.errors import ConfigError, NotRunningError, PicotronError
from picotron_ray.observability.report.page import duration
from picotron_ray.runtime.driver.console import ENDS
from picotron_ray.runtime.driver.find_stored import nearest_words, of_name
from picotron_ray.runtime.run_storage.run_account import newest_step
from picotron_ray.runtime.run_storage.stored_run import CUT_OFF, StoredRun, read_brief

log = logging.getLogger(__name__)


def in_place_of(error: NotRunningError) -> ConfigError:
    """Return what to say of a run that does not go on: how it ended, or the name that may be meant."""
    if not error.run:
        return error
    try:
        storage = of_name(error.run)
        if storage is not None:
            return ConfigError(end_words(read_brief(storage, error.run), time.time()))
    except (PicotronError, KeyError, TypeError) as why:
        log.debug("the end of run %s is not known: %s", error.run, why)
        return ConfigError(
            f"run: {error.run!r} was launched from here and does not go on; its storage does not tell how it"
            f" ended ({why}); `picotron-ray logs {error.run}` has its lines"
        )
    return ConfigError(f"{error}{nearest_words(error.run)}")


def end_words(run: StoredRun, now_s: float) -> str:
    """Return one line: how a run ended, and the commands that tell more.

    A sign of life of the last two minutes may be that of a coordinator which died since.
    """
    state, name = run.vitals.state, run.name
    ended = run.summary if state not in ("running", CUT_OFF) else None  # else it is of an earlier launch
    at = f" at step {newest_step(run) if ended is None else ended['steps']}"
    seconds = max(0, int(now_s - run.vitals.updated_s))
    ago = f"{seconds} s ago" if seconds < 60 else f"{duration(seconds)} ago"
    if not run.vitals.updated_s:
        said = f"has no coordinator; its storage says {state}"
    elif state == "running":
        said = (
            f"has no coordinator here; its newest sign of life was {ago}: it died since, or goes on elsewhere"
        )
    elif state == CUT_OFF:
        said = f"died without an end{at}: its newest sign of life was {ago}"
    else:
        said = f"{ENDS.get(state, state)}{at}, {ago}"
    return f"run {name!r} {said}; see `picotron-ray report {name}`, `logs {name}` or `dashboard {name}`"
