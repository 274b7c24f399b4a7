"""``ray job submit`` on two nodes with token authentication: stop, resubmit, kill, attach, refuse.

The package comes out of the uploaded folder, and differs from the installed one: a process that imported
another one would be refused by its fingerprint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import picotron_ray
from picotron_ray.runtime.heartbeat import process_alive, read_page
from picotron_ray.runtime.ray_cluster.fingerprint import package_fingerprint
from picotron_ray.runtime.ray_cluster.names import run_folder
from tests.support.runs.memory_group import until
from tests.support.runs.ray_jobs import TwoNodes

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
CONFIG: dict[str, Any] = {
    "name": "submitted",
    "steps": 1_000_000,
    "model": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 2},
    "data": {"source": "text", "path": "corpus", "sequence_length": 32, "global_batch": 8},
    "optimizer": {"learning_rate": 3e-3, "schedule": {"kind": "constant"}},
    "cluster": {"max_workers": 1, "device": "cpu"},
    "checkpoint": {"interval_steps": 50},
    "evaluate": {"interval_steps": 1_000_000, "samples": 8},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    cluster = TwoNodes()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: package, corpus, config."""
    folder = tmp_path_factory.mktemp("project")
    package = Path(picotron_ray.__file__).parent
    shutil.copytree(package, folder / "picotron_ray", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "picotron_ray" / "__init__.py").open("a") as file:
        file.write("# of the uploaded folder\n")
    shutil.copytree(package / "config", folder / "corpus", ignore=shutil.ignore_patterns("__pycache__"))
    storage = tmp_path_factory.mktemp("storage")
    text = yaml.safe_dump({**CONFIG, "storage": {"url": str(storage)}})
    (folder / "my.yaml").write_text(text)
    return folder


def storage(project: Path, run: str = "submitted") -> Path:
    return Path(yaml.safe_load((project / "my.yaml").read_text())["storage"]["url"]) / run


def commits(project: Path) -> list[int]:
    """Steps committed, oldest first."""
    entries = [json.loads(path.read_text()) for path in sorted((storage(project) / "log").iterdir())]
    return [entry["body"]["step"] for entry in entries if entry["kind"] == "commit"]


def ended(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=200)
    return process.returncode


def pages(run: str) -> list[Any]:
    found = [read_page(path) for path in run_folder("/dev/shm", run).glob("*/*.page")]
    return [page for page in found if page and process_alive(page.pid, page.start_ticks)]


def gone(run: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while run_folder("/dev/shm", run).exists():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_stop_resubmit_kill_and_attach(cluster: TwoNodes, project: Path) -> None:
    patient = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}
    metadata = {"team": "a"}
    # the driver runs on a worker node
    side = {"entrypoint_resources": {"side": 1}, "runtime_env_json": patient, "metadata_json": metadata}
    with cluster.submit("one", project, "my.yaml", **side) as one:
        cluster.wait_for("one", lambda log: "committed" in log)
        status = json.loads(cluster.run("picotron_ray.cli", "status", "submitted", "--json", cwd=project))
        assert status["submissions"] == [{"submission_id": "one", "metadata": metadata}]
        told = cluster.run("picotron_ray.cli", "checkpoint-now", "submitted", cwd=project)
        assert int(re.findall(r"step (\d+) is committed", told)[0]) in commits(project)
        cluster.api("jobs/one/stop", "POST")
        assert ended(one) == 0, "`ray job submit` of a job that was stopped"
    job = cluster.api("jobs/one")
    assert (job["status"], job["metadata"]["team"]) == ("STOPPED", "a")
    log = cluster.log("one")
    stopped_at = int(re.findall(r"run submitted stopped at step (\d+)", log)[0])
    assert "run submitted in Ray job one (team=a)" in log
    assert "Ray job one: the driver exits with code 130" in log
    assert commits(project)[-1] == stopped_at
    saved = json.loads((storage(project) / "run.json").read_text())
    assert saved["package"] != package_fingerprint()
    assert saved["config"]["data"]["path"] == "corpus"

    with cluster.submit("two", project, "my.yaml") as two:
        cluster.wait_for("two", lambda log: f"from commit of step {stopped_at}" in log)
        cluster.wait_for("two", lambda log: f"step {stopped_at // 50 * 50 + 100} committed" in log)
        os.kill(int(cluster.api("jobs/two")["driver_info"]["pid"]), signal.SIGKILL)
        assert ended(two) == 1
    job = cluster.api("jobs/two")
    assert job["status"] == "FAILED"
    assert job["driver_exit_code"] in (-9, 137), "the second where a shell stands between Ray and the driver"

    # nothing of the job is left but the run, which must still find its package to start a worker
    (worker,) = pages("submitted")
    os.kill(worker.pid, signal.SIGKILL)
    before = worker.step
    deadline = time.monotonic() + 120
    while not any(page.step > before and page.pid != worker.pid for page in pages("submitted")):
        assert time.monotonic() < deadline, "no worker was started in place of the dead one"
        time.sleep(0.3)

    with cluster.submit("three", project, "my.yaml", "steps=2000000") as three:
        cluster.wait_for("three", lambda log: "attached to run submitted" in log and "[running]" in log)
        assert "steps: was 1000000, now 2000000; accepted, once the run is stopped" in cluster.log("three")
        cluster.run("picotron_ray.cli", "stop", "submitted", cwd=project)
        assert ended(three) == 1
    job = cluster.api("jobs/three")
    assert (job["status"], job["driver_exit_code"]) == ("FAILED", 130)
    summary = json.loads((storage(project) / "summary.json").read_text())
    assert [entry["submission_id"] for entry in summary["submissions"]] == ["one", "two", "three"]
    assert summary["steps"] == commits(project)[-1] > stopped_at
    ledger = json.loads(cluster.run("picotron_ray.cli", "ledger", "verify", "my.yaml", "--json", cwd=project))
    assert (ledger["ok"], ledger["steps"]) == (True, summary["steps"])
    gone("submitted")


def test_a_driver_killed_while_it_stops_leaves_the_stop_to_the_coordinator(
    cluster: TwoNodes, project: Path
) -> None:
    """And what it starts from is another run's commit."""
    hasty = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "1"}}
    words = ("my.yaml", "name=child", "init_from.run=submitted", "elastic.interrupt_timeout_s=8")
    with cluster.submit("four", project, *words, runtime_env_json=hasty) as four:
        cluster.wait_for("four", lambda log: "step 50 committed" in log)
        (worker,) = pages("child")
        os.kill(worker.pid, signal.SIGSTOP)  # so that the stop takes longer than a second
        cluster.api("jobs/four/stop", "POST")
        ended(four)
        assert "run child" not in cluster.log("four").splitlines()[-1], "the driver saw the end after all"
        os.kill(worker.pid, signal.SIGCONT)
    gone("child")
    summed_up = storage(project, "child") / "summary.json"  # it is told last of all, after the nodes are left
    until(summed_up.exists, "the run ended without a summary")
    summary = json.loads(summed_up.read_text())
    assert summary["status"] == "stopped"
    assert summary["checkpoints"][-1]["step"] == summary["steps"] >= 50
    assert summary["first_loss"] < 4.0, "drawn from a seed it begins at ln 264 = 5.6"
    origin = json.loads((storage(project, "child") / "run.json").read_text())["origin"]
    assert 0 < origin["step"] <= commits(project)[-1]


def test_two_launches_of_one_name_beside_another_run(cluster: TwoNodes, project: Path) -> None:
    """Three drivers, two coordinators; each run has its own worker."""
    environment = {**cluster.environment, "RAY_ADDRESS": cluster.address}

    def launch(run: str) -> subprocess.Popen[str]:
        words = ["my.yaml", f"name={run}", "steps=20", "--json"]
        return subprocess.Popen(
            [sys.executable, "-m", "picotron_ray.launch", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=project,
            env=environment,
        )

    drivers = [launch(run) for run in ("twice", "twice", "beside")]
    outputs = [driver.communicate(timeout=300) for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0, 0], outputs
    summaries = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    assert summaries[0] == summaries[1]
    assert [summary["steps"] for summary in summaries] == [20, 20, 20]
    terms = [path.name for path in (storage(project, "twice") / "log").iterdir()]
    kinds = [json.loads((storage(project, "twice") / "log" / name).read_text())["kind"] for name in terms]
    assert kinds.count("term") == 1


def test_what_is_refused_inside_and_outside_a_job(cluster: TwoNodes, project: Path) -> None:
    begin = time.monotonic()
    refused = cluster.run("picotron_ray.launch", "my.yaml", cwd=project, expect=2, RAY_AUTH_TOKEN="0" * 64)
    assert time.monotonic() - begin < 15, "Ray itself tries for a minute"
    assert len(refused.splitlines()) == 1
    assert "refuses the token that this process has" in refused
    with cluster.submit("five", project, "my.yaml", "storage.url=./runs") as five:
        assert ended(five) == 1
    job = cluster.api("jobs/five")
    assert (job["status"], job["driver_exit_code"]) == ("FAILED", 2)
    assert "error: storage.url: saw './runs' in Ray job five" in cluster.log("five")
