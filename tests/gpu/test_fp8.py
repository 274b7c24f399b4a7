"""fp8 on a CUDA device that has it: its own products against the same roundings by wider ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.precision import fp8
from picotron_ray.train.engine import build_engine

pytest.importorskip("torchao")
CUDA = torch.device("cuda", 0)
MODEL = ModelConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, layers=2, heads=4, kv_heads=4, init_std=0.1
)


@pytest.fixture(autouse=True)
def has_fp8() -> None:
    if torch.cuda.get_device_capability(CUDA) < (8, 9):
        pytest.skip("no fp8 on this device")


def gradients(precision: str) -> tuple[float, torch.Tensor]:
    """Loss and all first gradients, as one vector."""
    data = DataConfig(sequence_length=64, global_batch=4)
    engine = build_engine(
        JobConfig(precision=precision, model=MODEL, data=data), Layout(micro_batch=4), 0, None, CUDA
    )
    engine.initialise(0)
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (1, 4, 65))
    feed = StepBatch(1, tokens, np.ones((1, 4)), global_tokens=256, rows=(0, 4), digest=bytes(16))
    loss, _ = engine.gradients_of(feed)
    found = torch.cat([entry.tensor.flatten() for entry in engine.gradients()]).cpu()
    engine.close()
    return float(loss), found


def test_real_products_are_as_the_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, ours = gradients("fp8")
    _, wider = gradients("bf16")
    monkeypatch.setattr(fp8, "EMULATE", True)
    emulated_loss, emulated = gradients("fp8")
    assert loss == pytest.approx(emulated_loss, rel=0.01)
    error, rounding = ((x - ours).norm() / ours.norm() for x in (emulated, wider))
    assert error < 0.5 * rounding, "nearer to the same roundings than to bf16"
