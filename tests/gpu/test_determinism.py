"""Two runs on a GPU have the same bits under ``kernels.deterministic``, by each kernel that has a way."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from picotron_ray.config.schema.compute import KernelsConfig
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.determinism import choose_algorithms, prepare_cublas
from tests.gpu.training import trained

MOE = {"experts": 8, "top_k": 2, "intermediate_size": 128, "capacity_factor": 1.0}
MODEL = ModelConfig.model_validate(
    {"vocab_size": 512, "hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 2, "moe": MOE}
)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    choose_algorithms(JobConfig())


def job(attention: str, loss: str, precision: str) -> JobConfig:
    return JobConfig(
        precision=precision,
        model=MODEL,
        data=DataConfig(sequence_length=128, global_batch=8),
        kernels=KernelsConfig.model_validate({"deterministic": True, "attention": attention, "loss": loss}),
    )


@pytest.mark.parametrize("loss", ["logits", "linear"])
@pytest.mark.parametrize(
    ("attention", "precision"), [("flash", "bf16"), ("efficient", "fp32"), ("math", "fp32")]
)
def test_two_runs_have_the_same_bits(attention: str, precision: str, loss: str) -> None:
    config, found = job(attention, loss, precision), []
    prepare_cublas(config, os.environ)
    for _ in range(3):
        engine, losses = trained(config, Layout(micro_batch=2))
        assert "deterministic algorithms" in engine.applied
        found.append((losses, {item.shard.name: item.values().cpu() for item in engine.state()}))
        engine.close()
    for losses, state in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(value, found[0][1][name]) for name, value in state.items())
