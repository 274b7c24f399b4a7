"""Losses on several held-out sets at one layout, each summed over all ranks in one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.dataset import build_dataset
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from picotron_ray.train.evaluation import summed

CPU = torch.device("cpu")


def held_out_losses(job: JobConfig, layout: Layout, rank: int, groups: Any, folder: Path) -> list[float]:
    """Mean losses of the held-out part and of each set beside, as the loop takes them."""
    engine = build_engine(job, layout, rank, groups, CPU)
    engine.initialise(job.seed)
    data = build_dataset(job.data, job.model.vocab_size, job.seed, folder, evaluate=job.evaluate)
    at = layout.coordinates(rank).dp
    sets = [data.eval_batches(layout, at, job.evaluate.samples), *data.set_batches(layout, at)]
    totals = summed([engine.evaluate(batches)[0] for batches in sets], layout, CPU)
    engine.close()
    counts = [sum(batch.loss_tokens for batch in batches) for batches in sets]
    return [total / count for total, count in zip(totals, counts, strict=True)]


def evaluate_layout(job: Any, config: JobConfig, layout: Layout, folder: str) -> Sequence[float]:
    """One rank of one layout in a fresh generation."""
    groups = job.groups(backend="gloo", device=CPU)
    groups.connect()
    try:
        return held_out_losses(config, layout, job.rank, groups, Path(folder))
    finally:
        groups.close()
