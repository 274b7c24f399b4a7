"""A sweep of eight real trials: a worker killed, a trial out of memory, interrupted half-way and resumed."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from picotron_ray.config.load import load_job
from picotron_ray.runtime.heartbeat import PageView, process_alive, read_page
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay
from picotron_ray.runtime.ray_cluster.names import NAMESPACE, user_folder
from tests.support.runs.ray_runs import kill
from tuning import sweep

pytestmark = pytest.mark.timeout(900)  # about a minute of an idle machine; several Rays may share two cores
SWEEP = "drill"
JOB: dict[str, Any] = {
    "name": "sweep-test",
    "steps": 100,
    # 64 rows at once need twice the memory that a worker may take here, 4 or 8 rows a fraction of it
    "model": {"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "layers": 2, "kv_heads": 4},
    "data": {"sequence_length": 128, "global_batch": 64},
    "cluster": {
        "max_workers": 1, "device": "cpu", "start_timeout_s": 200.0, "worker_memory_bytes": 128 * 2**20,
    },
    "evaluate": {"samples": 8},
    "elastic": {"first_step_timeout_s": 120.0, "hang_floor_s": 60.0},
}  # fmt: skip


@contextlib.contextmanager
def start(config: Path, address: str) -> Iterator[subprocess.Popen[str]]:
    options = ["--name", SWEEP, "--trials", "8", "--layout-trials", "3", "--micro-batches", "4,8,64"]
    command = [
        sys.executable,
        "-m",
        "tuning.sweep",
        str(config),
        *options,
        "--steps",
        "4",
        "--concurrent",
        "2",
    ]
    with subprocess.Popen(
        [*command, "--json"],
        env={**os.environ, "RAY_ADDRESS": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as sweep:
        try:
            yield sweep
        finally:
            sweep.kill()


def training() -> list[PageView]:
    """Pages of living workers of the sweep that have finished a step."""
    pages = [read_page(path) for path in user_folder("/dev/shm").glob(f"{SWEEP}.*/*/*.page")]
    return [page for page in pages if page and page.step >= 1 and process_alive(page.pid, page.start_ticks)]


def until(reached: Callable[[], Any], sweep: subprocess.Popen[str], timeout_s: float = 400.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := reached()):
        if time.monotonic() > deadline or sweep.poll() is not None:
            sweep.kill()
            raise AssertionError(sweep.communicate())
        time.sleep(0.1)
    return found


@pytest.mark.deep  # over two minutes of an idle machine
@pytest.mark.usefixtures("connected")
def test_a_sweep_survives_and_resumes(local_ray: LocalRay, tmp_path: Path) -> None:
    from ray.util import list_named_actors

    def actors() -> list[str]:
        named = list_named_actors(all_namespaces=True)
        return [a["name"] for a in named if a["namespace"] == NAMESPACE and a["name"].startswith(SWEEP)]

    def all_gone() -> None:
        """Runs whose trial was ended commit, then go."""
        deadline = time.monotonic() + 200
        while actors():
            assert time.monotonic() < deadline, actors()
            time.sleep(0.2)

    config, folder = tmp_path / "job.yaml", tmp_path / "runs" / SWEEP
    config.write_text(yaml.safe_dump({**JOB, "storage": {"url": str(tmp_path / "runs")}}))
    with start(config, local_ray.address) as sweep:
        kill(until(training, sweep)[0].pid)
        until((folder / "layouts.json").exists, sweep)
        until(training, sweep)
        sweep.send_signal(signal.SIGTERM)
        out, err = sweep.communicate(timeout=300)
    assert sweep.returncode == 130, err
    assert "the same command resumes it" in err
    all_gone()

    with start(config, local_ray.address) as sweep:
        out, err = sweep.communicate(timeout=500)
    assert sweep.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    check_trials(found["trials"])
    assert found == json.loads((folder / "results.json").read_text())
    table = csv.DictReader((folder / "results.csv").read_text().splitlines())
    assert [row["trial"] for row in table] == [row["trial"] for row in found["trials"]]
    all_gone()

    best = load_job(str(folder / "best.yaml"))
    rates = [
        row for row in found["trials"] if row["stage"] == "learning-rates" and row["status"] == "finished"
    ]
    assert best.optimizer.learning_rate == min(rates, key=lambda row: row["eval_loss"])["learning_rate"]
    assert best.layout.micro_batch in (4, 8)
    assert (best.name, best.steps) == ("sweep-test-best", 100)
    done = subprocess.run(
        [sys.executable, "-m", "picotron_ray.cli", "validate", str(folder / "best.yaml")], check=False
    )
    assert done.returncode == 0


def check_trials(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 8
    failed = [row for row in rows if row["status"] == "failed"]
    assert [row["layout"] for row in failed] == ["dp1-tp1-pp1-mb64"]
    assert "out of memory" in failed[0]["reason"]
    assert {row["status"] for row in rows} <= {"finished", "failed", "stopped"}
    layouts = [row for row in rows if row["stage"] == "layouts" and row["status"] == "finished"]
    assert len(layouts) == 2
    assert sum(row["failures"] for row in layouts) >= 1, "the killed worker"
    assert any(row["stage"] == "learning-rates" and row["status"] == "finished" for row in rows)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"trials": 1}, "--trials: saw 1, expected an integer >= 2"),
        ({"search": "guess"}, "--search: saw 'guess', expected a string that matches"),
        ({"micro_batches": "x"}, "--micro-batches: saw 'x', expected numbers as in 4,8"),
        ({"overrides": ["optimizer.schedule.warmup_steps=9"]}, "optimizer.schedule.warmup_steps: saw 9"),
    ],
)
def test_mistakes_are_refused_before_any_ray_is_started(
    values: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sweep, "connected", lambda *_: pytest.fail("Ray was started"))
    config = tmp_path / "job.yaml"
    config.write_text(yaml.safe_dump({**JOB, "storage": {"url": str(tmp_path / "runs")}}))
    with pytest.raises((SystemExit, typer.Exit)) as ended:
        sweep.main(str(config), steps=8, **values)
    assert (getattr(ended.value, "exit_code", None) or getattr(ended.value, "code", None)) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
