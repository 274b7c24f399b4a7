"""Findings of a run that goes on, and silences, asked of its coordinator."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError
from picotron_ray.observability.alerts.detectors import UNUSUAL
from picotron_ray.observability.alerts.rules import BY_NAME, rules_of
from picotron_ray.observability.report.page import duration
from picotron_ray.runtime.driver.run_connection import connect_to_run

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
    _order(run, "silence", rule, seconds, why)


def unsilence(run: str, rule: str) -> None:
    """End the silences of a rule of a run.

    Raises:
        ConfigError: the rule is not silenced, or the run's alerts are off.
    """
    _order(run, "unsilence", rule)


def _order(run: str, method: str, *arguments: Any) -> None:
    import ray

    coordinator, _ = connect_to_run(run)
    refused = ray.get(getattr(coordinator, method).remote(*arguments), timeout=ANSWER_S)
    if refused:
        raise ConfigError(refused)


def rule_rows(job: JobConfig) -> list[dict[str, Any]]:
    """Return the rules as a config has them, those that are off too: what each looks at, when it fires."""
    on = {rule.name: rule for rule in rules_of(job.alerts, gpu=True)} if job.alerts.enabled else {}
    if set(job.alerts.detectors) & {"robust", "learned"} and job.alerts.enabled:
        on[UNUSUAL.name] = UNUSUAL
    acts = {each.rule: each.do for each in job.alerts.act}
    return [
        {
            "rule": name,
            "severity": rule.severity,
            "figure": rule.figure,
            "fires": f"{rule.kind} {rule.threshold:g}" + (f" with {rule.beside}" if rule.beside else "")
            if rule is not UNUSUAL
            else f"alerts.detectors {', '.join(job.alerts.detectors)}",
            "windows": rule.windows,
            "on": "no" if name not in on else "GPUs alone" if rule.gpu else "yes",
            "act": acts.get(name, "-"),
            "means": rule.means,
        }
        for name, rule in {**BY_NAME, UNUSUAL.name: UNUSUAL, **on}.items()
    ]


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
        why = f": {each['why']}" if each["why"] else ""
        yield f"silenced: {each['rule']} {_until(each['until_s'], now)}{why}"


def _until(until_s: float | None, now_s: float) -> str:
    """Say how much longer a silence lasts."""
    if until_s is None:
        return "until the run's end"
    left_s = max(0.0, until_s - now_s)
    at = datetime.fromtimestamp(until_s, UTC).strftime("%H:%M" if left_s < 86_400 else "%Y-%m-%d %H:%M")
    return f"for {duration(int(left_s))} more (until {at} UTC)"
