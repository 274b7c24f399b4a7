"""Causes of a rank's memory: together they are the estimate, and their formulas hold the numbers."""

from __future__ import annotations

import pytest

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import rank_memory
from picotron_ray.planner.memory_explained import explain_memory
from picotron_ray.planner.model_sizes import blocks_again, parameter_count

MODEL = ModelConfig(vocab_size=2048, hidden_size=256, intermediate_size=704, layers=4, heads=8, kv_heads=4)


def job_of(**optimizer: object) -> JobConfig:
    data = DataConfig(sequence_length=64, global_batch=8)
    return JobConfig(model=MODEL, data=data, precision="fp32", optimizer=OptimizerConfig(**optimizer))


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(pp=2, tp=2, dp=2, zero=2), Layout(pp=4)],
    ids=str,
)
@pytest.mark.parametrize(
    "optimizer", [{}, {"name": "sgd"}, {"offload": True}, {"moments": "8bit"}, {"name": "muon"}], ids=str
)
def test_causes_together_are_the_estimate(layout: Layout, optimizer: dict[str, object]) -> None:
    job = job_of(**optimizer)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank).pp
        estimate = rank_memory(job, layout, at, blocks_again(job, layout, at))
        causes = explain_memory(job, layout, rank)
        assert sum(cause.bytes for cause in causes) == pytest.approx(estimate.total_bytes)
        assert all(cause.bytes >= 0 for cause in causes)


def test_weights_are_the_parameters() -> None:
    weights, gradients, optimizer, *_ = explain_memory(job_of(), Layout(), 0)
    count = parameter_count(MODEL)
    assert weights.bytes == gradients.bytes == 4 * count
    assert optimizer.bytes == 8 * count
    assert f"{count:,} parameters x 2 moments x 4 bytes" in optimizer.formula
