"""What storage tells of runs, put together for people: the report of one, the list of all, differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from picotron_ray.observability.archive import Segment, in_order
from picotron_ray.observability.report.page import duration, report_page
from picotron_ray.runtime.driver.find_stored import find_stored_run
from picotron_ray.runtime.run_storage.run_account import failure_seconds, run_account
from picotron_ray.runtime.run_storage.stored_run import StoredRun


@dataclass(frozen=True, slots=True)
class Report:
    """Report of a run: its account, and the page."""

    account: dict[str, Any]
    page: str


def report(word: str) -> Report:
    """Make the report of the run that ``word`` names (`find_stored.find_storage`).

    Raises:
        ConfigError: there is none.
        StorageError: its storage does not answer.
    """
    run = find_stored_run(word)
    account = run_account(run)
    curve = [(one.step, one.at_s, one.loss) for one in run.steps]
    return Report(account, report_page(account, run.config, curve, run_events(run), run.telemetry.windows))


def run_events(run: StoredRun) -> list[dict[str, Any]]:
    """Return the events of a run that its archive and its record have, oldest first."""
    recorded = tuple(run.facts.events) if run.facts is not None else ()
    _, events = in_order((Segment((), run.telemetry.events), Segment((), recorded)))
    return [dict(event) for event in events]


def report_lines(account: dict[str, Any]) -> Iterator[str]:
    """Yield the account of a run in a few lines."""
    goodput = account["goodput"]
    share = "-" if goodput is None else f"{goodput:.1%}"
    yield (
        f"run {account['run']}: {account['state']} at step {account['step']} of {account['steps'] or '?'},"
        f" goodput {share} of {duration(account['wall_s'])}"
    )
    causes = sorted(account["seconds"].items(), key=lambda one: -one[1])
    yield "  " + ", ".join(f"{cause} {seconds:.1f} s" for cause, seconds in causes if seconds >= 0.05)
    for failure in account["failures"][-5:]:
        yield (
            f"  {failure['kind']} of {failure['target']} at step {failure['step']} cost"
            f" {failure_seconds(failure):.2f} s, {failure['lost_steps']} steps were done again"
        )
