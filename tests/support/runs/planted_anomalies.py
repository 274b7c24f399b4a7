"""Anomalies planted in a live run, and what its alerts said of them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.observability.alerts.rules import BY_NAME
from tests.support.runs.ray_runs import Watched, tiny_job

WORKERS = ("worker:0", "worker:1")
ROW_S = 0.002
"""Sleep per row that paces steps, so that a crowded machine is little slower than a quiet one."""
SLACK_S = 6.0
"""Beside the windows: a heartbeat, a tick, and a crowded machine's delays."""


def planted_job(name: str, folder: Path, faults: list[dict[str, Any]], **sections: Any) -> JobConfig:
    """A job of two workers at a steady pace that does not end by itself."""
    given: dict[str, Any] = {
        "steps": 1_000_000,
        "cluster": {"max_workers": 2},
        "checkpoint": {"interval_steps": 100},
        "evaluate": {"interval_steps": 500_000, "samples": 2},
        "telemetry": {"interval_s": 0.5},
        "elastic": {"heartbeat_s": 0.25, "grow": False},
        "optimizer": {"learning_rate": 1e-5},  # the loss stays where it is
        "chaos": [*everywhere("slow", 1, row_s=ROW_S), *faults],
    }
    for key, value in sections.items():
        given[key] = {**given.get(key, {}), **value} if isinstance(value, dict) else value
    return tiny_job(name, folder, **given)


def everywhere(fault: str, step: int, **more: Any) -> list[dict[str, Any]]:
    """A fault of both workers at a step."""
    return [{"fault": fault, "target": target, "step": step, **more} for target in WORKERS]


def struck_at(job: JobConfig, index: int) -> float:
    """When a fault struck: its claim is an object of the run's storage."""
    claim = Path(job.storage.url) / job.name / "chaos" / str(index)
    return float(json.loads(claim.read_text())["at_s"])


def told(watched: Watched, rule: str, after_s: float) -> dict[str, Any] | None:
    """The first finding of a rule that the run's events tell after a time; None: none yet."""
    watched.look()
    findings = (event for event in watched.events if event["kind"] == "alert" and event["t"] >= after_s)
    asked = {"rule": rule, "state": "firing"}
    return next((event for event in findings if asked.items() <= event["data"].items()), None)


def await_finding(watched: Watched, rule: str, after_s: float, timeout_s: float = 90.0) -> dict[str, Any]:
    """Wait for a finding of a rule."""
    deadline = time.monotonic() + timeout_s
    while (found := told(watched, rule, after_s)) is None:
        assert time.monotonic() < deadline, f"{rule} did not fire\n{watched.log()}"
        time.sleep(0.1)
    return found


def stated_delay_s(rule: str, interval_s: float) -> float:
    """Delay within which a rule is to fire: its windows, one that was under way, one that is on its way."""
    known = BY_NAME[rule]
    rises = known.threshold if known.kind == "rising" else 0
    return (known.windows + rises + 2) * interval_s + SLACK_S
