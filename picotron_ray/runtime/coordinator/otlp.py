"""Spans by the OpenTelemetry protocol over HTTP (extra ``otel``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.observability.spans import RunSpan, span_id, trace_id

TRACES = "/v1/traces"
TIMEOUT_S = 5
LIBRARY = "picotron_ray"


def traces_url(endpoint: str) -> str:
    """Address that takes spans, from the collector's.

    >>> traces_url("http://collector:4318"), traces_url("https://otlp.example/v1/traces")
    ('http://collector:4318/v1/traces', 'https://otlp.example/v1/traces')
    """
    return endpoint if endpoint.rstrip("/").endswith(TRACES) else endpoint.rstrip("/") + TRACES


class _Newest(logging.Handler):
    """Handler that keeps the newest line: the SDK tells why it failed in its log alone, each time."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def open_exporter(job: JobConfig) -> Callable[[Sequence[RunSpan]], str]:
    """Return what sends spans of a run, and returns why they were not taken; it may take `TIMEOUT_S`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import SpanExportResult

    newest, theirs = _Newest(), logging.getLogger("opentelemetry")
    theirs.addHandler(newest)
    theirs.propagate = False  # the run's record says it, once
    assert job.telemetry.otel.endpoint is not None
    exporter = OTLPSpanExporter(endpoint=traces_url(job.telemetry.otel.endpoint), timeout=TIMEOUT_S)

    def send(spans: Sequence[RunSpan]) -> str:
        newest.text = ""
        try:
            if exporter.export(sdk_spans(job, spans)) is SpanExportResult.SUCCESS:
                return ""
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return newest.text or "it was not said why"

    return send


def sdk_spans(job: JobConfig, spans: Sequence[RunSpan]) -> list[Any]:
    """Spans as the SDK has them, with ids that follow from their keys."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    trace, scope = trace_id(job), InstrumentationScope(LIBRARY)
    resource = Resource({"service.name": LIBRARY, "picotron.run": job.name})

    def context(key: str) -> SpanContext:
        return SpanContext(
            trace, span_id(trace, key), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )

    return [
        ReadableSpan(
            name=span.name,
            context=context(span.key),
            parent=context(span.parent) if span.parent else None,
            resource=resource,
            attributes=dict(span.attributes),
            kind=SpanKind.INTERNAL,
            instrumentation_scope=scope,
            status=Status(StatusCode.ERROR if span.failed else StatusCode.OK),
            start_time=round(span.began_s * 1e9),
            end_time=round(max(span.began_s, span.ended_s) * 1e9),
        )
        for span in spans
    ]
