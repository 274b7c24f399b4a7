"""The story of a run with real kills: audited goodput against other clocks, telemetry, a report."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.observability.goodput import FAILURE_CAUSES
from picotron_ray.runtime.run_storage.telemetry_archive import read_archive
from tests.support.runs.ray_runs import kill, ledger, start, storage_of, tiny_job

STEPS = 300


def recovered(status: dict[str, Any]) -> int:
    return sum(failure["recovered_s"] is not None for failure in status["failures"])


@pytest.mark.deep
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("connected")
def test_the_account_of_a_run_with_kills_agrees_with_other_clocks(tmp_path: Path) -> None:
    """Clocks: this process's, around the kills and the whole run, and those of the ledger's lines."""
    job = tiny_job(
        "storied",
        tmp_path,
        steps=STEPS,
        telemetry={"interval_s": 0.5},
        checkpoint={"interval_steps": 50},
        cluster={"max_workers": 3},
        elastic={"replace_workers": False},
        chaos=[{"fault": "slow", "target": "worker:0", "step": 1, "row_s": 0.01}],
    )
    began_s = time.time()
    watched = start(job)
    watched.until(bool)
    answered_s = time.time()
    killed: list[float] = []
    for at in (60, 140):
        watched.until(lambda status, at=at: status["step"] >= at)
        victim = sorted(watched.pids().items())[-1]
        killed.append(time.time())
        kill(victim[1])
        watched.until(
            lambda status: sum(f["recovered_s"] is not None for f in status["failures"]) == len(killed)
        )
    summary = watched.finish()
    ended_s = time.time()
    assert summary["status"] == "finished", watched.log()

    page, account_file = tmp_path / "report.html", tmp_path / "account.json"
    said = CliRunner().invoke(
        app, ["report", str(tmp_path / "storied"), "--to", str(page), "--json", str(account_file)]
    )
    assert said.exit_code == 0, said.output
    account = json.loads(account_file.read_text())
    print(json.dumps({key: account[key] for key in ("wall_s", "goodput", "seconds", "failures")}, indent=1))
    assert sum(account["seconds"].values()) == pytest.approx(account["wall_s"], rel=0.005)
    assert ended_s - answered_s - 2.0 < account["wall_s"] < ended_s - began_s

    lines = ledger(job)
    done_s = {line["step"]: line["at_s"] for line in lines}
    gaps = {step: done_s[step] - done_s[step - 1] for step in range(2, STEPS + 1)}
    usual_s = statistics.median(gaps.values())
    assert len(account["failures"]) == 2
    for failure, killed_s in zip(account["failures"], killed, strict=True):
        parts = sum(failure[f"{cause}_s"] for cause in FAILURE_CAUSES)
        step, gap_s = max(
            ((s, gap) for s, gap in gaps.items() if done_s[s] > killed_s > done_s[s - 1] - 1.0),
            key=lambda one: one[1],
        )
        print(f"failure at step {failure['step']}: parts {parts:.3f} s, gap before step {step} {gap_s:.3f} s")
        assert parts + usual_s == pytest.approx(gap_s, abs=0.25), "the gap has the next step too"
        assert failure["detected_s"] == pytest.approx(killed_s - account["began_at_s"], abs=1.5)
    steps_s = sum(gap for gap in gaps.values() if gap < 0.5)
    assert account["seconds"]["steps"] == pytest.approx(steps_s, rel=0.15)

    found = read_archive(storage_of(job))
    assert not found.complaints
    assert len(found.windows) > 3
    assert {"loss", "step_s", "straggler_ratio", "goodput_ratio"} <= found.windows[-1].figures.keys()
    assert {"failure", "recovery"} & {event["kind"] for event in found.events}
    assert "Audited goodput" in page.read_text()
