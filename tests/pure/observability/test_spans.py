"""Spans of a run: what they say, one trace over restarts, a collector that is away."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.observability.logs.lines import Place, head, read_line
from picotron_ray.observability.spans import RunSpan, recovery_spans, span_id, trace_id, trace_text
from picotron_ray.runtime.coordinator import span_export
from picotron_ray.runtime.coordinator.otlp import open_exporter
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.span_export import SpanExport

FAILURE = {
    "kind": "worker-exited", "target": "w1", "step": 9, "lost_steps": 2, "restored_from": "slots",
    "detected_s": 10.0, "recovered_s": 3.0,
    "detect_s": 0.5, "decide_s": 0.25, "rebuild_s": 1.0, "restore_s": 0.0, "recompute_s": 1.5,
}  # fmt: skip


def job_with(endpoint: str = "http://127.0.0.1:9") -> JobConfig:
    return load_job("tiny", [f"telemetry.otel.endpoint={endpoint}"])


def test_a_recovery_is_cut_into_its_phases() -> None:
    whole, *phases = recovery_spans(1000.0, 3, FAILURE)
    assert (whole.began_s, whole.ended_s) == (1009.5, 1013.0)
    assert [(each.name, each.began_s, each.ended_s) for each in phases] == [
        ("detect", 1009.5, 1010.0),
        ("decide", 1010.0, 1010.25),
        ("rebuild", 1010.25, 1011.25),
        ("recompute", 1011.25, 1012.75),
    ], "one after the other; what took no time is left out"
    assert {each.parent for each in phases} == {whole.key}
    assert recovery_spans(1000.0, 3, {**FAILURE, "recovered_s": None}) == []


def test_ids_follow_from_the_run_and_the_key() -> None:
    """A coordinator that Ray starts again goes on in the same trace."""
    job = job_with()
    trace = trace_id(job)
    assert trace == trace_id(job_with("https://elsewhere")), "the collector is not part of it"
    assert trace != trace_id(job.model_copy(update={"name": "other"}))
    assert span_id(trace, "run") == span_id(trace, "run") != span_id(trace, "commit 5")


def test_a_log_record_carries_the_trace() -> None:
    trace = trace_text(job_with())
    for place in (Place("1.2", 3, 4, trace), Place(trace=trace)):
        read = read_line(head(0.5, "INFO", "a", place) + "text", "stdout", Place(), 9.0)
        assert read is not None
        assert (read["trace"], read["generation"], read["rank"]) == (trace, place.generation, place.rank)


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://user:hunter2@collector"])
def test_bad_addresses_are_refused_and_their_secrets_not_told(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.otel\.endpoint") as refusal:
        job_with(endpoint)
    assert "hunter2" not in str(refusal.value)


class Collector:
    """Collector of spans that may be away."""

    def __init__(self) -> None:
        self.spans: list[RunSpan] = []
        self.away = False

    def __call__(self, spans: Sequence[RunSpan]) -> str:
        if not self.away:
            self.spans += spans
        return "connection refused" if self.away else ""


def generation(n: int) -> m.RunGeneration:
    spec = m.GenerationSpec(
        m.GenerationId(1, n), (m.Member("w0", "node"),), Layout(), m.Source("init"), "start"
    )
    return m.RunGeneration(spec)


def exported(monkeypatch: pytest.MonkeyPatch) -> tuple[SpanExport, Collector, RunRecord]:
    monkeypatch.setattr(span_export, "INTERVAL_S", 0.01)
    job, collector = job_with(), Collector()
    record = RunRecord(job)
    return SpanExport(job, record, collector), collector, record


def wait_for(done: Any) -> None:
    until = time.monotonic() + 30
    while not done() and time.monotonic() < until:
        time.sleep(0.01)
    assert done()


def test_generations_follow_each_other_and_the_run_is_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    spans, collector, _ = exported(monkeypatch)
    spans.observe(m.Tick(), [generation(1)], 10.0)
    spans.observe(m.Tick(), [generation(2)], 20.0)
    spans.observe(m.Tick(), [m.Finish("failed", "", m.Source("slots"))], 30.0)
    spans.finish("failed")
    found = {span.key: span for span in collector.spans}
    assert list(found) == ["generation 1.1", "generation 1.2", "run"]
    assert (found["generation 1.1"].began_s, found["generation 1.1"].ended_s) == (10.0, 20.0)
    assert found["generation 1.2"].attributes["ended"] == "failed"
    assert found["run"].failed
    assert not found["run"].parent


def test_a_collector_that_is_away_loses_the_oldest_and_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(span_export, "MOST_WAITING", 8)
    spans, collector, record = exported(monkeypatch)
    collector.away = True
    for n in range(1, 22):
        spans.observe(m.Tick(), [generation(n)], float(n))
    wait_for(lambda: any(event["kind"] == "otel" for event in record.status(0)["events"]))
    assert spans.dropped == 20 - 8
    collector.away = False
    wait_for(lambda: len(collector.spans) == 8)
    spans.finish("finished")
    assert [span.key for span in collector.spans[:2]] == ["generation 1.13", "generation 1.14"]
    told = [event["text"] for event in record.status(0)["events"] if event["kind"] == "otel"]
    assert len(told) == 2
    assert "takes no spans (connection refused)" in told[0]
    assert "12 were lost" in told[1]


def test_the_protocol_carries_them() -> None:
    """A real exporter, and a server that decodes what it sends."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    taken: list[ExportTraceServiceRequest] = []
    answers = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(answers[0] if self.path == "/v1/traces" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        job = job_with(f"http://127.0.0.1:{server.server_address[1]}")
        send = open_exporter(job)
        assert send(recovery_spans(1000.0, 0, FAILURE)) == ""
        answers[0] = 401
        assert "401" in send(recovery_spans(1000.0, 0, FAILURE)), "why is told"
    finally:
        server.shutdown()
        server.server_close()
    (scope,) = taken[0].resource_spans[0].scope_spans
    whole, detect, *_ = scope.spans
    assert int.from_bytes(whole.trace_id) == trace_id(job)
    assert detect.parent_span_id == whole.span_id
    assert (whole.start_time_unix_nano, whole.end_time_unix_nano) == (1009_500_000_000, 1013_000_000_000)
    assert {each.key for each in whole.attributes} == {
        "kind",
        "target",
        "step",
        "lost_steps",
        "restored_from",
    }
