"""``ElasticTrainer``: a run by Ray Train's conventions on a given cluster, and its end with its process."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ray.train import TrainingFailedError
from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.config import CheckpointConfig, RunConfig, ScalingConfig

import picotron_ray
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.runtime.ray_cluster.names import NAMESPACE
from tests.support.runs.ray_runs import kill, tiny_job

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(400)]
PATIENT = {"start_timeout_s": 200.0}  # several Rays may share two cores


class Seen(UserCallback):
    """Notes what it is told; kills its worker once, at the first report."""

    def __init__(self, victim: Any = None) -> None:
        self.reports: list[dict[str, Any]] = []
        self.checkpoints: list[int] = []
        self.exceptions: list[dict[int, Exception]] = []
        self._victim = victim

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        self.reports.append(metrics[0])
        if checkpoint is not None:
            self.checkpoints.append(checkpoint.step)
        if self._victim:
            victim, self._victim = self._victim, None
            victim()

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self.exceptions.append(worker_exceptions)


def living(run: str) -> list[str]:
    from ray.util import list_named_actors

    named = list_named_actors(all_namespaces=True)
    return [a["name"] for a in named if a["namespace"] == NAMESPACE and a["name"].startswith(f"{run}/")]


def test_fit_returns_rays_result_and_survives_a_kill(tmp_path: Path) -> None:
    # By script: a fast machine is through all steps before a report could lead to a kill.
    fault = {"fault": "kill", "target": "worker:0", "step": 30, "phase": "forward"}
    sections: dict[str, Any] = {"checkpoint": {"interval_steps": 20}, "cluster": PATIENT, "chaos": (fault,)}
    job = tiny_job("fit", tmp_path / "ignored", steps=70, **sections)
    seen = Seen()
    trainer = picotron_ray.ElasticTrainer(
        job,
        scaling_config=ScalingConfig(num_workers=(1, 2)),
        run_config=RunConfig(
            name="fit",
            storage_path=str(tmp_path),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            callbacks=[seen],
        ),
    )
    result = trainer.fit()
    assert living("fit") == []
    assert result.error is None
    assert result.path == str(tmp_path / "fit")
    assert result.metrics is not None
    assert (result.metrics["status"], result.metrics["step"]) == ("finished", 70)
    assert result.metrics["loss"] == result.metrics["final_loss"]
    assert seen.reports[-1]["eval_loss"] == result.metrics["eval_loss"] < result.metrics["baseline_loss"] * 2
    assert seen.exceptions, "the kill was not told"
    assert len(result.metrics["failures"]) == 1
    assert seen.checkpoints[-1] <= result.checkpoint.step == 70
    check_checkpoint(result, job.model.layers)
    assert "layers.0.attention.wq.weight" in pickle.loads(pickle.dumps(result.checkpoint)).tensors()


def check_checkpoint(result: Any, layers: int) -> None:
    steps = [row["step"] for _, row in result.best_checkpoints]
    assert steps == list(result.metrics_dataframe["step"])
    assert (len(steps), steps[-1]) == (2, 70)  # num_to_keep
    assert result.metrics_dataframe["loss"].iloc[-1] == result.metrics["final_loss"]
    with result.checkpoint.as_directory() as folder:
        assert (Path(folder) / result.checkpoint.get_metadata()["manifest"]).is_file()
    tensors = result.checkpoint.tensors()
    weights = [name for name in tensors if "/" not in name]
    assert len(tensors) == 3 * len(weights), "two moments each"
    assert tensors[f"layers.{layers - 1}.attention.wq.weight"].shape == (32, 32)


def kill_worker(run: str) -> None:
    """SIGKILL the worker of rank 0, found by its page."""
    from picotron_ray.runtime.heartbeat import read_page
    from picotron_ray.runtime.ray_cluster.names import run_folder

    pages = [read_page(path) for path in run_folder("/dev/shm", run).glob("*/*.page")]
    kill(next(page.pid for page in pages if page is not None and page.rank == 0))


@pytest.mark.slow
def test_a_failed_run_raises_and_an_exception_of_a_callback_stops_it(tmp_path: Path) -> None:
    one = {"cluster": {"max_workers": 1, **PATIENT}}
    job = tiny_job("fails", tmp_path, steps=100_000, elastic={"max_failures": 0}, **one)
    seen = Seen(victim=lambda: kill_worker("fails"))
    trainer = picotron_ray.ElasticTrainer(job, run_config=RunConfig(name="fails", callbacks=[seen]))
    with pytest.raises(
        TrainingFailedError, match=r"1 failures in 24 hours, more than elastic\.max_failures=0"
    ) as caught:
        trainer.fit()
    assert caught.value.result.error is caught.value  # type: ignore[attr-defined]
    assert seen.exceptions
    assert living("fails") == []

    job = tiny_job("leaves", tmp_path, steps=100_000, checkpoint={"interval_steps": 100_000}, **one)

    def leave() -> None:
        raise SystemExit(0)  # as tune.report does in a trial that is stopped

    trainer = picotron_ray.ElasticTrainer(
        job, run_config=RunConfig(name="leaves", callbacks=[Seen(victim=leave)])
    )
    left = []

    def fit() -> None:
        with pytest.raises(SystemExit):
            trainer.fit()
        left.append(living("leaves"))

    thread = threading.Thread(target=fit)  # as Tune's trials do
    thread.start()
    thread.join(200)
    assert left == [[]]
    assert [entry.key for entry in open_storage(job.storage, "leaves").list("manifests/")], "no commit"


SCRIPT = """
import sys, ray, picotron_ray
ray.init(address=sys.argv[1], log_to_driver=False)
job = {"name": "owned", "steps": 100000, "storage": {"url": sys.argv[2]}, "cluster": {"max_workers": 1,
       "start_timeout_s": 200, "device": "cpu"}, "checkpoint": {"interval_steps": 100000}, "evaluate":
       {"interval_steps": 100000}}
picotron_ray.ElasticTrainer(job).fit()
"""


@pytest.mark.slow
def test_the_run_ends_with_a_commit_where_its_process_was_killed(local_ray: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, local_ray.address, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as script:
        until(lambda: any("/worker/" in name for name in living("owned")))
        until(lambda: any((tmp_path / "owned" / "log").glob("00000002*")))  # a generation runs
        os.kill(script.pid, signal.SIGKILL)
    until(lambda: not living("owned"))
    assert list((tmp_path / "owned" / "manifests").iterdir()), "stopped without a commit"


def until(reached: Any, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)
