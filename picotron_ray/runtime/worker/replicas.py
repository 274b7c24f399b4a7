"""Check of replicas of one generation, as its spec and the job ask for it (`train.replica_check`)."""

from __future__ import annotations

import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.codec import plain
from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.train.engine import Engine
from picotron_ray.train.replica_check import NoReplicaCheck, replica_check


def check_of(
    job: JobConfig, spec: GenerationSpec, rank: int, engine: Engine, device: torch.device
) -> NoReplicaCheck:
    """Make the check, and say what it covers; all ranks together."""
    every, ranks = job.debug.replica_check_steps, spec.layout.world_size
    replay = None if spec.replay is None else plain(spec.replay)
    found = replica_check(every, lambda: engine.replicated(), rank, ranks, device, spec.resume_step, replay)
    for text in found.applied:
        print(f"generation {spec.id} rank {rank}: {text}", flush=True)
    return found
