"""Rules of the section telemetry."""

from __future__ import annotations

from collections.abc import Iterator

from picotron_ray.config.problem import Problem
from picotron_ray.config.schema.job import JobConfig


def _otel(job: JobConfig) -> Iterator[Problem]:
    endpoint = job.telemetry.otel.endpoint
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        text = f"saw {endpoint!r}, expected an address that begins with http:// or https://"
        yield Problem("telemetry.otel.endpoint", text)
    elif "@" in endpoint:
        text = "saw an address with credentials: give them by OTEL_EXPORTER_OTLP_HEADERS"
        yield Problem("telemetry.otel.endpoint", text)


RULES = (_otel,)
"""A list of rules, each from a job to its problems."""
