"""Runs of tiny jobs on a real Ray: start, watch, disturb, and read back what they left in storage."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.verify import latest_good, read_ledger
from picotron_ray.config.schema.job import JobConfig

TINY: dict[str, Any] = {
    "steps": 40,
    "precision": "fp64",
    "model": {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 4},
    "data": {"sequence_length": 16, "global_batch": 12},
    "optimizer": {"learning_rate": 3e-3, "schedule": {"kind": "constant"}},  # losses do not depend on steps
    "cluster": {"max_workers": 4, "device": "cpu", "cpus_per_worker": 1},
    "checkpoint": {"interval_steps": 10},
    "evaluate": {"interval_steps": 20, "samples": 8},
    "snapshot": {"interval_steps": 1},
    "elastic": {"first_step_timeout_s": 30.0},
}


def tiny_job(name: str, storage: Path | str, **sections: Any) -> JobConfig:
    """A job of a second or two; keyword arguments replace or extend sections."""
    values: dict[str, Any] = {**TINY, "name": name, "storage": {"url": str(storage)}}
    for key, value in sections.items():
        before = values.get(key)
        values[key] = {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    return JobConfig.model_validate(values)


@dataclass
class Watched:
    """A run that goes on, or has ended; call it through the cluster that this process is connected to."""

    job: JobConfig
    coordinator: Any
    events: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)

    def look(self) -> dict[str, Any]:
        """Poll the coordinator once; an unreachable one leaves the last status."""
        import ray

        since = self.events[-1]["seq"] if self.events else 0
        try:
            self.status = ray.get(self.coordinator.status.remote(since), timeout=20)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return self.status
        self.events += self.status["events"]
        return self.status

    def until(self, reached: Callable[[dict[str, Any]], bool], timeout_s: float = 240) -> dict[str, Any]:
        """Wait for a status; fails with the run's events where it does not come."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.look()
            if status and reached(status):
                return status
            if time.monotonic() > deadline or (status and status["done"]):
                at = f"status {status.get('state')} at step {status.get('step')}"
                raise AssertionError(f"not reached; {at}\n{self.log()}")
            time.sleep(0.05)

    def log(self) -> str:
        """The run's events, a line each."""
        return "\n".join(f"{e['t']:.2f} {e['level']} {e['kind']}: {e['text']}" for e in self.events)

    def finish(self, timeout_s: float = 240) -> dict[str, Any]:
        """Wait for the end and take the coordinator away; returns the summary."""
        import ray

        status = self.until(lambda s: s["done"], timeout_s)
        ray.kill(self.coordinator)
        return dict(status["summary"])

    def pids(self) -> dict[str, int]:
        """Pids of the living workers, by name, from their pages."""
        from picotron_ray.runtime.heartbeat import process_alive, read_page
        from picotron_ray.runtime.ray_cluster.names import run_folder

        pages = run_folder(self.job.snapshot.folder, self.job.name).glob("*/*.page")
        views = [view for page in pages if (view := read_page(page)) is not None]
        return {view.worker: view.pid for view in views if process_alive(view.pid, view.start_ticks)}


def start(job: JobConfig) -> Watched:
    """Start (or attach to) a run on the cluster that this process is connected to."""
    from picotron_ray.runtime.driver.driver import ensure_coordinator

    return Watched(job, ensure_coordinator(job)[0])


def run(job: JobConfig, timeout_s: float = 240) -> dict[str, Any]:
    """Run a job to its end; returns the summary. Fails with the run's events where it did not finish."""
    watched = start(job)
    summary = watched.finish(timeout_s)
    assert summary["status"] == "finished", f"{summary['detail']}\n{watched.log()}"
    return summary


def storage_of(job: JobConfig) -> Storage:
    return open_storage(job.storage, job.name)


def ledger(job: JobConfig) -> list[dict[str, Any]]:
    """The committed ledger, one line per step."""
    storage = storage_of(job)
    log = RunLog(storage)
    log.refresh()
    good = latest_good(storage, log)
    assert good is not None, "no commit"
    assert not good.complaints, good.complaints
    return [json.loads(line) for line in read_ledger(storage, good.manifest)]


def losses(job: JobConfig) -> list[float]:
    """Loss per step, checked to be of the steps 1, 2, 3 …"""
    lines = ledger(job)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def in_one_process(job: JobConfig) -> list[float]:
    """Loss per step of the same job without Ray, groups or faults."""
    import torch

    from picotron_ray.data.batch import make_batch
    from picotron_ray.data.dataset import build_dataset
    from picotron_ray.data.plan.sample_plan import Feed
    from picotron_ray.layout.layout import Layout
    from picotron_ray.runtime.ray_cluster.names import cache_folder
    from picotron_ray.train.engine import build_engine
    from picotron_ray.train.optim.lr_schedule import learning_rate

    layout = Layout(micro_batch=job.data.global_batch)
    data = build_dataset(job.data, job.model.vocab_size, job.seed, cache_folder()).train
    engine = build_engine(job, layout, 0, None, torch.device("cpu"))
    engine.initialise(job.seed)
    found = []
    for step in range(1, job.steps + 1):
        batch = make_batch(Feed.uniform(data, job.seed, job.data.global_batch), layout, 0, step)
        found.append(float(engine.gradients_of(batch)[0]) / batch.global_tokens)
        engine.optimizer_step(learning_rate(job.optimizer, step, job.steps))
    engine.close()
    return found


def check_ledger(job: JobConfig) -> None:
    """Every sample fed exactly once, proved by its tokens."""
    from picotron_ray.data.dataset import build_dataset
    from picotron_ray.data.ledger import check
    from picotron_ray.runtime.ray_cluster.names import cache_folder

    splits = build_dataset(job.data, job.model.vocab_size, job.seed, cache_folder())
    report = check(ledger(job), splits.plan, splits.train)
    assert (report.lost, report.repeated, report.wrong) == (0, 0, ()), report


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
