"""Findings of a run that goes on, and silences, asked of its coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver.control import connect_to_run

ANSWER_S = 20.0
OFF = "alerts are off in this run (alerts.enabled, telemetry.interval_s)"


def alerts_of(run: str) -> dict[str, Any]:
    """Return what fires in a run, what is over, and what is silenced.

    Raises:
        ConfigError: no run of that name goes on here, or its alerts are off.
        ClusterError: no Ray answers.
    """
    import ray

    coordinator, _ = connect_to_run(run)
    found: dict[str, Any] | None = ray.get(coordinator.alerts.remote(), timeout=ANSWER_S)
    if found is None:
        raise ConfigError(f"run {run}: {OFF}")
    return {"run": run, **found}


def silence(run: str, rule: str, seconds: float, why: str) -> None:
    """Silence a rule of a run.

    Raises:
        ConfigError: there is no such run or rule, or its alerts are off.
    """
    import ray

    coordinator, _ = connect_to_run(run)
    refused = ray.get(coordinator.silence.remote(rule, seconds, why), timeout=ANSWER_S)
    if refused:
        raise ConfigError(refused)


def alert_lines(found: dict[str, Any], every: bool) -> Iterator[str]:
    """Yield a line for each finding and silence, for people.

    Args:
        every: also findings that are over.
    """
    now = time.time()
    for each in found["firing"]:
        what = f"{each['severity']} {each['rule']}{' (silenced)' if each['silenced'] else ''}"
        yield f"{what}, {each['where']}, for {now - each['since_s']:.0f} s: {each['said']}"
        yield f"  next: {each['advice']}"
    if not found["firing"]:
        yield f"nothing fires, after {found['windows']} windows"
    for each in found["resolved"] if every else ():
        lasted_s = each["at_s"] - each["since_s"]
        yield f"over: {each['rule']}, {each['where']}, lasted {lasted_s:.0f} s: {each['said']}"
    for each in found["silences"]:
        until = "the run's end" if each["until_s"] is None else f"{each['until_s'] - now:.0f} s from now"
        yield f"silenced: {each['rule']} until {until}{': ' + each['why'] if each['why'] else ''}"
