"""What the pool's processes do for tests/gloo/bench/test_mfu.py."""

from __future__ import annotations

import os
from typing import Any

import torch

from picotron_ray.bench.mfu.peers import peer
from picotron_ray.bench.mfu.settings import Setting, base_setting
from picotron_ray.bench.mfu.worker import Segments, WorkerPlace
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
