"""Spans of a run for OpenTelemetry: the run, generations, recoveries with their phases, commits, some steps.

A span is known by its key: the same part of the same run has the same id whichever process tells of it, so
that a coordinator that Ray starts again goes on in the same trace. All spans of a run form one trace, whose
id comes of the run's address in storage. Log records carry it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.observability.goodput import FAILURE_CAUSES

Value = str | bool | int | float
ROOT = "run"


@dataclass(frozen=True, slots=True)
class RunSpan:
    """A stretch of a run's time.

    Fields:
        key: names it within its run; `span_id` follows from it.
        parent: key of the span around it; "" for the root.
        began_s, ended_s: in seconds since the epoch.
        failed: whether it ended badly.
    """

    name: str
    key: str
    parent: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    failed: bool = False


def trace_id(job: JobConfig) -> int:
    """Trace of a run, 128 bits, by its address in storage."""
    return int.from_bytes(blake2b(f"{job.storage.url}/{job.name}".encode(), digest_size=16).digest())


def trace_text(job: JobConfig) -> str:
    """Trace of a run as 32 hexadecimal digits, as log records have it.

    >>> from picotron_ray.config.load import load_job
    >>> len(trace_text(load_job("tiny")))
    32
    """
    return f"{trace_id(job):032x}"


def trace_of(job: JobConfig) -> str | None:
    """Trace that a job's log records belong to; None where its run sends no spans."""
    return trace_text(job) if job.telemetry.otel.endpoint else None


def span_id(trace: int, key: str) -> int:
    """Id of a span, 64 bits."""
    return int.from_bytes(blake2b(f"{trace:032x}/{key}".encode(), digest_size=8).digest())


def generation_key(term: int, n: int) -> str:
    """Key of a generation's span.

    >>> generation_key(1, 2)
    'generation 1.2'
    """
    return f"generation {term}.{n}"


def recovery_spans(began_s: float, number: int, failure: Mapping[str, Any]) -> list[RunSpan]:
    """A recovery that is over, and its phases one after the other: none, where it did not end.

    Args:
        began_s: when the run began, in seconds since the epoch.
        number: of the failure in the run.
        failure: as `runtime.coordinator.summary.failure_entries` formats it.
    """
    if failure["recovered_s"] is None:
        return []
    known_s = began_s + failure["detected_s"]
    spent = {cause: float(failure.get(f"{cause}_s") or 0.0) for cause in FAILURE_CAUSES}
    at_s, key = known_s - spent["detect"], f"recovery {number}"
    phases = []
    for cause, seconds in spent.items():
        if seconds > 0:
            phases.append(RunSpan(cause, f"{key} {cause}", key, at_s, at_s + seconds))
        at_s += seconds
    about = {name: failure[name] for name in ("kind", "target", "step", "lost_steps", "restored_from")}
    ended_s = max(at_s, known_s + failure["recovered_s"])
    return [RunSpan("recovery", key, ROOT, known_s - spent["detect"], ended_s, about), *phases]


def step_spans(page: Mapping[str, Any]) -> list[RunSpan]:
    """The newest finished step, as the page of rank 0 tells it; none before the first."""
    ended_s, seconds = page.get("step_at_s") or 0.0, page.get("step_time_s") or 0.0
    if not ended_s or not seconds:
        return []
    about: dict[str, Value] = {"step": page["step"], "loss": page.get("loss") or 0.0}
    parent = generation_key(page["term"], page["n"])
    return [RunSpan("step", f"step {page['step']} {parent}", parent, ended_s - seconds, ended_s, about)]
