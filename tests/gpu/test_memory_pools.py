"""Memory pools on a CUDA device: gradients and moments lie in theirs, and training is the same."""

from __future__ import annotations

import torch

from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.memory.pools import POOLED, MemoryPools
from picotron_ray.runtime.worker.allocator import choose_allocator
from picotron_ray.train.engine import build_engine
from picotron_ray.train.memory_account import accounted_step, held
from tests.gpu.test_offload import job, long_batch
from tests.gpu.training import CUDA


def addresses(pool: torch.cuda.MemPool) -> list[tuple[int, int]]:
    return [(segment["address"], segment["total_size"]) for segment in pool.snapshot()]


def test_moments_lie_in_a_pool_of_the_expected_size() -> None:
    config = job(64)
    pools = MemoryPools(CUDA, dict.fromkeys(POOLED, 3e8))
    before = addresses(pools._pools["optimizer"])
    assert sum(size for _, size in before) >= 3e8
    engine = build_engine(config, Layout(micro_batch=4), 0, None, CUDA, pools=pools)
    engine.initialise(0)
    batch = long_batch(config)

    def step(phase: object = None) -> float:
        loss, _ = engine.gradients_of(batch)
        engine.optimizer_step(1e-3)
        return loss

    step()
    _, account = accounted_step(engine, step)
    assert account.most["optimizer"] == 2 * account.most["weights"]
    segments = addresses(pools._pools["optimizer"])
    for moment in held(engine)["optimizer"]:
        assert any(start <= moment.data_ptr() < start + size for start, size in segments)
    engine.close()


def test_the_allocators_options_are_taken() -> None:
    choose_allocator("best-fit")
    assert torch.ones(4, device=CUDA).sum() == 4
