"""Offloading on a CUDA device: what lies where, and the same training with and without."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from tests.gpu.training import CUDA, trained

MODEL = ModelConfig(
    vocab_size=1024, hidden_size=1024, intermediate_size=2816, layers=6, heads=8, kv_heads=8, init_std=0.1
)


def job(length: int = 8, **options: object) -> JobConfig:
    return JobConfig(
        precision="fp64",
        model=MODEL,
        data=DataConfig(sequence_length=length, global_batch=4),
        optimizer=OptimizerConfig(**options),
    )


def long_batch(config: JobConfig) -> StepBatch:
    """One micro-batch of four rows."""
    length = config.data.sequence_length
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (1, 4, length + 1))
    weights = np.ones((1, 4))
    return StepBatch(1, tokens, weights, global_tokens=4 * length, rows=(0, 4), digest=bytes(16))


def test_moments_lie_in_pinned_memory_and_train_alike() -> None:
    layout, found = Layout(micro_batch=4), {}
    for offload in (False, True):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        engine, losses = trained(job(offload=offload), layout)
        state = {entry.shard.name: entry.tensor for entry in engine.state()}
        moments = {name: x for name, x in state.items() if "/" in name}
        weights = [x for name, x in state.items() if "/" not in name]
        assert all(x.device.type == ("cpu" if offload else "cuda") for x in moments.values())
        assert all(x.is_pinned() for x in moments.values()) is offload
        assert all(x.device.type == "cuda" for x in weights)
        held = torch.cuda.memory_allocated() - before
        found[offload] = (losses, {name: x.cpu() for name, x in state.items()}, held)
        size = sum(x.nbytes for x in moments.values())
        engine.close()
        del engine, state, moments, weights
    (plain, before_state, much), (ours, state, little) = found[False], found[True]
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=0)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, before_state[name], rtol=1e-8, atol=1e-10, msg=name)
    assert much - little > 0.5 * size, "two slots of staging remain"


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_wait_in_host_memory(recompute: str) -> None:
    """The same gradients, and less memory at the peak."""
    config, found = job(length=1024), {}
    for offload in (False, True):
        layout = Layout(micro_batch=4, recompute=recompute, offload_activations=offload)
        engine = build_engine(config, layout, 0, None, CUDA)
        engine.initialise(0)
        feed = long_batch(config)
        engine.gradients_of(feed)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss, _ = engine.gradients_of(feed)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        found[offload] = loss, [entry.tensor.cpu() for entry in engine.gradients()], peak
        engine.close()
        del engine
    (plain, expected, much), (ours, gradients, little) = found[False], found[True]
    assert ours == pytest.approx(plain, rel=1e-12)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-14)
    assert little < (0.75 if recompute == "none" else 1.0) * much
