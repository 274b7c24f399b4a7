"""Training in this process for the benchmarks of data: an engine of one rank, step after step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from picotron_ray.config.load import parse_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.data.batch import StepBatch, make_batch
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import Engine, build_engine
from picotron_ray.train.optim.lr_schedule import learning_rate
from picotron_ray.train.passes import silent

MODEL = {"vocab_size": 260, "heads": 4, "layers": 2}


def job_of(words: dict[str, Any], hidden: int) -> JobConfig:
    """Make a config of a small model of this width."""
    model = {**MODEL, "hidden_size": hidden, "intermediate_size": 2 * hidden}
    return parse_job({"name": "bench-data", "model": model, **words})


class OneProcess:
    """Engine of one process, its data, and what it has been fed.

    Fields:
        tokens: predicted tokens fed so far, those that count nowhere included, padding not.
    """

    def __init__(self, job: JobConfig, folder: Path) -> None:
        self.job, self.tokens = job, 0
        self.data: DataSplits = build_dataset(job.data, job.model.vocab_size, job.seed, folder)
        self.layout = Layout(micro_batch=job.data.global_batch)
        self._engine: Engine = build_engine(job, self.layout, 0, None, torch.device("cpu"))
        self._engine.initialise(job.seed)

    def batch(self, step: int) -> StepBatch:
        """Make a step's batch."""
        return make_batch(self.data.feed, self.layout, 0, step)

    def train(self, batch: StepBatch) -> None:
        """Take one step."""
        self._engine.gradients_of(batch, silent)
        self._engine.optimizer_step(learning_rate(self.job.optimizer, batch.step, self.job.steps))
        self.tokens += batch.global_tokens

    def held_out(self, samples: int) -> float:
        """Return the held-out loss, nats per token that counts."""
        batches = self.data.eval_batches(self.layout, 0, samples)
        total, _ = self._engine.evaluate(batches)
        return total / sum(batch.loss_tokens for batch in batches)
