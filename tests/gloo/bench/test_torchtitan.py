"""torchtitan as a peer trains the very model that ours is: the same loss, gradients and weights.

Runs where ``PICOTRON_TORCHTITAN`` is a checkout of github.com/pytorch/torchtitan and what it imports is
installed (spmd_types, tyro, portpicker).
"""

from __future__ import annotations

import os

import pytest

from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs import torchtitan_jobs

CHECKOUT = os.environ.get("PICOTRON_TORCHTITAN", "")
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="needs PICOTRON_TORCHTITAN, a checkout of torchtitan")

STRICT = [  # every setting of AdamW and every norm shows
    *("optimizer.weight_decay=5", "optimizer.eps=1e-3", "optimizer.clip_norm=0.1", "model.norm_eps=1e-3"),
    *("optimizer.learning_rate=0.01", "optimizer.schedule.warmup_steps=2", "model.rope_theta=100"),
    "model.init_std=0.3",
]
CASES = [
    (1, []),
    (1, ["layout.micro_batch=2", "model.tie_embeddings=true", "optimizer.decay_embeddings=false"]),
    (1, ["model.rope_scaling.factor=4", "model.rope_scaling.original_length=16", "kernels.loss=linear"]),
    (1, ["layout.recompute=full", "kernels.optimizer=foreach", "optimizer.clip_norm=null"]),
    (2, ["layout.zero=0", "layout.tp=1", "layout.micro_batch=2"]),
    (2, ["layout.zero=3", "layout.tp=1"]),
    (2, ["layout.tp=2", "kernels.loss=linear"]),
    (2, ["layout.tp=2", "model.tie_embeddings=true", "layout.micro_batch=4"]),
]


@pytest.mark.parametrize(("workers", "overrides"), CASES, ids=lambda case: str(case))
def test_three_steps_are_ours(workers: int, overrides: list[str], pool: Pool) -> None:
    for found in pool.run(workers, torchtitan_jobs.apart, CHECKOUT, [*STRICT, *overrides]):
        assert found["loss"] < 1e-5
        assert found["gradients"] < 1e-5
        assert found["weights"] < 1e-5


def test_its_attention_on_cuda_keeps_rows_apart_too(pool: Pool) -> None:
    overrides = [*STRICT, "layout.micro_batch=4"]
    assert pool.run(1, torchtitan_jobs.flex_loss_apart, CHECKOUT, overrides)[0] < 1e-5
