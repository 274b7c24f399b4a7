"""What the pool's processes do for tests/gloo/bench/test_mfu.py."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from picotron_ray.bench.common.training import EngineTraining, PlainTraining
from picotron_ray.bench.mfu import real_loop
from picotron_ray.bench.mfu.peers import peer
from picotron_ray.bench.mfu.settings import Setting, base_setting
from picotron_ray.bench.mfu.settings import by_the_loop as by_the_workers_loop
from picotron_ray.bench.mfu.worker import Segments, WorkerPlace
from picotron_ray.data.batch import make_batch
from picotron_ray.data.plan.sample_plan import Feed
from tests.support.gloo.pool import Job


def segments(job: Job, overrides: list[str]) -> list[dict[str, Any]]:
    """The tiny recipe by our engine, by the plain loop (where it can), and phase by phase, on all ranks."""
    os.environ.update(MASTER_ADDR=job.host, MASTER_PORT=str(job.port))
    base = base_setting("tiny", overrides, job.world_size, "cpu")
    settings = [base, *(found for found in [peer(base, "plain")] if isinstance(found, Setting))]
    plan = {
        "settings": [setting.to_dict() for setting in settings],
        "steps": 2,
        "warmup": 1,
        "checkouts": {},
    }
    runner = Segments(plan, WorkerPlace(job.rank, job.world_size, torch.device("cpu")))
    prefix = f"{job.prefix}/bench"
    timed = [runner.run(f"{prefix}/{i}", i, phases=False) for i in range(len(settings))]
    return [*timed, runner.run(f"{prefix}/phases", 0, phases=True)]


def by_the_loop(job: Job, overrides: list[str]) -> list[dict[str, Any]]:
    """The tiny recipe by the loop of workers: without snapshots, and twice with them, in one process."""
    os.environ.update(MASTER_ADDR=job.host, MASTER_PORT=str(job.port))
    base = base_setting("tiny", overrides, job.world_size, "cpu")
    settings = [found for found in by_the_workers_loop(base) if isinstance(found, Setting)]
    folder = Path(f"/dev/shm/picotron-bench-{job.prefix.replace('/', '-')}")
    folder.mkdir(exist_ok=True)
    plan = {"settings": [setting.to_dict() for setting in settings], "steps": 3, "warmup": 1, "checkouts": {}}
    place = WorkerPlace(job.rank, job.world_size, torch.device("cpu"))
    runner = Segments({**plan, "slots": str(folder)}, place)
    term = 10**6 + int(job.prefix.rpartition("-")[2])  # a store of its own has no other generation 1.1
    try:
        with patch.object(real_loop, "TERM", term):
            return [runner.run(f"{job.prefix}/{i}", i, phases=False) for i in (0, 1, 1)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def beside_the_engine(job: Job, overrides: list[str]) -> dict[str, Any]:
    """Three steps of the engine and of the plain loop: largest difference of weights, losses, phases."""
    os.environ.update(MASTER_ADDR=job.host, MASTER_PORT=str(job.port))
    base = base_setting("tiny", overrides, job.world_size, "cpu")
    plan = {"settings": [base.to_dict()], "steps": 1, "warmup": 0, "checkouts": {}}
    place = WorkerPlace(job.rank, job.world_size, torch.device("cpu"))
    runner = Segments(plan, place)
    found: dict[str, Any] = {"phases": {}, "losses": {}}
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for kind in ("engine", "plain"):
        setting = Setting(kind, kind, base.job, base.layout)
        with place.groups(f"{job.prefix}/{kind}", False) as groups:
            training = runner._training(setting, groups)
            phases: list[str] = []
            losses = []
            feed = Feed.uniform(runner._data, base.job.seed, base.job.data.global_batch)
            for step in range(1, 4):
                dp_index = base.layout.coordinates(job.rank).dp
                batch = make_batch(feed, base.layout, dp_index, step)
                losses.append(float(training.step(batch, phases.append)) / batch.global_tokens)
            if isinstance(training, EngineTraining):
                engine = training._engine
                weights[kind] = {w.shard.name: w.values().clone() for w in engine.weights()}
            else:
                assert isinstance(training, PlainTraining)
                losses = [loss * batch.global_tokens / job.world_size for loss in losses]
                weights[kind] = {
                    name: p.detach().clone() for name, p in training._replica.model.named_parameters()
                }
            found["phases"][kind], found["losses"][kind] = phases, losses
            training.close()
    assert weights["engine"].keys() == weights["plain"].keys()
    found["apart"] = max(
        float((weights["engine"][name] - plain).abs().max()) for name, plain in weights["plain"].items()
    )
    return found
