"""Seconds from the SIGKILL of a worker to the next finished step: ours, Ray Train's and torchft's.

The same small decoder, weights, batches, number of workers and checkpoint interval for all, on the same
machine, one after the other; only one of them runs at a time. All kills of one framework happen in one
run of it, in which a dead worker comes back: before each kill all workers are members and have trained
together for `SETTLE_CHECKPOINTS` intervals, the victim is drawn by seed, and so is the moment, within one
interval between checkpoints. A step of the peers is padded to the length that ours had.

common/statistics.py says what each figure means, recovery/picotron_ray.py and peers/ where each framework's
times come from.
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from picotron_ray.bench.common.machine import machine, versions
from picotron_ray.bench.common.signals import sigterm_exits
from picotron_ray.bench.common.statistics import recovery_ratios, summary
from picotron_ray.bench.recovery.peers.host import Peer, kill_workers
from picotron_ray.bench.recovery.peers.ray_train import SETTINGS as RAY_TRAIN
from picotron_ray.bench.recovery.peers.ray_train import RayTrain
from picotron_ray.bench.recovery.peers.torchft import SETTINGS as TORCHFT
from picotron_ray.bench.recovery.peers.torchft import TorchFT
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, install_extra

SETTLE_CHECKPOINTS = 2
PEERS: dict[str, type[Peer]] = {"ray_train": RayTrain, "torchft": TorchFT}
SETTINGS = {"ray_train": RAY_TRAIN, "torchft": TORCHFT}
NEEDS = {"ray_train": "ray", "torchft": "torchft"}


def job_for_recovery(folder: Path) -> JobConfig:
    """Steps of some 20 ms on two cores, replicated over 4 workers; 12 samples divide by 4 and by 3."""
    changes = [
        "name=bench-recovery",
        "steps=1000000",
        "data.global_batch=12",
        "optimizer.learning_rate=1.0e-3",
        "optimizer.schedule.kind=constant",
        "layout.tp=1",  # what the peers have: replicas of the whole model
        "layout.pp=1",
        "layout.zero=0",
        "cluster.max_workers=4",
        "cluster.device=cpu",
        "checkpoint.interval_steps=20",
        "evaluate.interval_steps=1000000",
        "elastic.max_failures=1000",
        f"storage.url={folder}",
    ]
    return load_job("tiny", changes)


def chosen_peers(names: str) -> list[str]:
    """From ``--peers``: names with commas between them, or ``none``.

    Raises ConfigError for an unknown name and for one that is not installed.
    """
    chosen = [] if names == "none" else [name.strip() for name in names.split(",")]
    problems = []
    for name in chosen:
        if name not in PEERS:
            problems.append(f"--peers: saw {name!r}, expected some of {', '.join(PEERS)}, or none")
        elif importlib.util.find_spec(NEEDS[name]) is None:
            problems.append(f"--peers: {name} is not installed: {install_extra('bench')}, or leave it out")
    if problems:
        raise ConfigError(*problems)
    return chosen


def bench(runs: int, seed: int, peers: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """Kill ``runs`` workers of each framework; returns every run's figures, their medians and ratios."""
    from picotron_ray.bench.recovery.picotron_ray import kill_run_workers

    with sigterm_exits(), tempfile.TemporaryDirectory(prefix="picotron-bench-") as name:
        folder = Path(name)
        job = job_for_recovery(folder / "ours")
        settle_steps = SETTLE_CHECKPOINTS * job.checkpoint.interval_steps
        kills, step_s = kill_run_workers(job, runs, settle_steps, random.Random(seed), say)
        found: dict[str, Any] = {"ours": summary(kills, step_s), "ray_train": None, "torchft": None}
        for peer in peers:
            subject = PEERS[peer](folder / peer, job, step_s)
            kills, peer_step_s = kill_workers(subject, runs, settle_steps, random.Random(seed), say)
            found[peer] = summary(kills, peer_step_s)
    return {
        "machine": {**machine(), **versions()},
        "job": {
            "model": job.model.model_dump(mode="json"),
            "global_batch": job.data.global_batch,
            "sequence_length": job.data.sequence_length,
            "workers": job.cluster.max_workers,
            "step_s": step_s,
            "checkpoint_interval_steps": job.checkpoint.interval_steps,
            "seed": seed,
            "settings": {peer: SETTINGS[peer] for peer in peers},
        },
        **found,
        **recovery_ratios(found["ours"], found["ray_train"]),
    }
