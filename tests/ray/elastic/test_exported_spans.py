"""A real run with a kill, whose spans a real OTLP receiver gets; one whose collector is away goes on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from picotron_ray.observability.logs.lines import decode
from picotron_ray.runtime.ray_cluster.log_folders import log_root
from tests.support.otlp_receiver import receiving
from tests.support.runs.ray_runs import run, start, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(120), pytest.mark.deep]


def test_a_run_with_a_kill_is_one_trace(tmp_path: Path) -> None:
    fault = {"fault": "kill", "target": "worker:1", "step": 12, "phase": "backward"}
    with receiving() as receiver:
        job = tiny_job(
            "traced", tmp_path, chaos=(fault,), cluster={"max_workers": 2}, layout={"dp": 2},
            telemetry={"otel": {"endpoint": receiver.url, "sample_steps": 1}},
        )  # fmt: skip
        summary = run(job)
    spans = receiver.spans()
    (trace,) = {span.trace_id.hex() for span in spans}
    ids = {span.span_id for span in spans}
    assert len(ids) == len(spans)
    assert all(span.parent_span_id in ids for span in spans if span.parent_span_id)
    (root,) = [span for span in spans if not span.parent_span_id]
    assert root.name == "run"
    named = {name: [span for span in spans if span.name == name] for name in {span.name for span in spans}}
    assert len(named["generation"]) == len(summary["generations"])
    assert len(named["recovery"]) == len(summary["failures"]) == 1
    assert {"commit", "step", "decide", "rebuild"} <= set(named)
    (failure,) = summary["failures"]
    for phase in {"detect", "decide", "rebuild", "restore"} & set(named):
        (span,) = named[phase]
        taken_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert taken_s == pytest.approx(failure[f"{phase}_s"], abs=0.05)
    records = [
        entry
        for path in log_root("traced").rglob("*")
        if path.is_file()
        for line in path.read_bytes().splitlines()
        if (entry := decode(line)) is not None and entry["logger"]
    ]
    untraced = [entry for entry in records if entry.get("trace") != trace]
    assert records
    assert {entry["logger"] for entry in untraced} == set(), untraced


def test_a_run_whose_collector_is_away_ends_well_and_says_so_once(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        otel = {"endpoint": url, "sample_steps": 1}
        watched = start(tiny_job("untraced", tmp_path, cluster={"max_workers": 1}, telemetry={"otel": otel}))
        assert watched.finish()["status"] == "finished"
    told = [event["text"] for event in watched.events if "takes no spans" in event["text"]]
    assert len(told) == 1
