"""Optimizer moments in host memory: AdamW as on the device, under every layout, from and into any other.

Here the device is a CPU, so that everything runs but streams; what goes where is counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from picotron_ray.comm.copy_stream import CopyStream
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.model import ModelConfig
from picotron_ray.config.schema.optimizer import OptimizerConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from picotron_ray.train.optim import adamw_offload
from picotron_ray.train.optim.adamw_offload import OffloadedAdamW, ParameterGroup
from tests.gloo.train.test_engine import Operators
from tests.support.gloo.late_copies import LateCopyStream
from tests.support.gloo.parallel_jobs.matrix_jobs import (
    CPU,
    MIXTURE,
    MODEL,
    assemble,
    batch,
    make_job,
    run_layout,
)
from tests.support.gloo.parity import WEIGHTS_TOLERANCE, compare, reference, thinned, worst
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.muon_jobs import leg

THREADS = 1
SIZES = [(3, 5), (7,), (40,), (2, 2), (6, 9), (1,)]
# fmt: off
LAYOUTS = [
    (MODEL, Layout(dp=2, micro_batch=3), 12),
    (MODEL, Layout(dp=3, zero=3, micro_batch=2), 7),  # rows that do not divide: one rank holds less
    (MODEL, Layout(tp=2, micro_batch=6), 12),
    (MODEL, Layout(dp=2, pp=2, zero=2, micro_batch=2), 10),
    (MODEL, Layout(dp=2, cp=2, zero=1, micro_batch=3), 12),
    (MIXTURE, Layout(dp=2, tp=2, ep=2, micro_batch=3), 12),
]
# fmt: on
CASES = thinned(LAYOUTS, (1, 3, 5), lambda model, layout, _: f"{'mixture-' * (model is MIXTURE)}{layout}")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def offloaded(job: JobConfig) -> JobConfig:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"offload": True})})


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this process cut their tensors, and have many buckets under way."""
    plain = OffloadedAdamW.__init__
    monkeypatch.setattr(
        OffloadedAdamW, "__init__", lambda self, *given: plain(self, *given, bucket_bytes=8 * 100)
    )


@pytest.mark.parametrize(("model", "layout", "global_batch"), CASES)
def test_layout_equals_one_process_with_moments_on_the_device(
    pool: Pool, model: ModelConfig, layout: Layout, global_batch: int
) -> None:
    job = offloaded(make_job("adamw", global_batch, model))
    ranks = [results[0] for results in pool.run(layout.world_size, run_layout, [job], layout)]
    assert compare(job, layout, ranks) == []
    assert all(rank.stable for rank in ranks)


@pytest.mark.parametrize("offload_first", [True, False])
def test_moments_go_on_in_another_layout_and_on_the_other_side(
    pool: Pool, tmp_path: Path, offload_first: bool
) -> None:
    plain = make_job("adamw", 12)
    first, second = (offloaded(plain), plain) if offload_first else (plain, offloaded(plain))
    before, after = Layout(dp=3, zero=3, micro_batch=2), Layout(tp=2, micro_batch=6)
    pool.run(before.world_size, leg, first, before, (0, 2), tmp_path)
    found = pool.run(after.world_size, leg, second, after, (2, 3), tmp_path)
    far, name = worst(assemble(found), assemble([reference("adamw", 12).state]))
    assert far < WEIGHTS_TOLERANCE, name


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, dtype=torch.float64, generator=generator) for size in SIZES]


def made(bucket_bytes: int) -> tuple[OffloadedAdamW, list[Tensor]]:
    weights = tensors(0)
    groups = [([0, 2, 4], 0.3), ([1, 3, 5], 0.0)]
    group = [
        ParameterGroup([f"w{i}" for i in ns], [weights[i] for i in ns], ns, decay) for ns, decay in groups
    ]
    return OffloadedAdamW(OptimizerConfig(offload=True), group, CPU, THREADS, bucket_bytes), weights


@pytest.mark.parametrize("stream", [CopyStream, LateCopyStream], ids=["prompt", "late"])
@pytest.mark.parametrize("bucket_bytes", [8, 8 * 7, 8 * 20, 2**20])
def test_every_cut_into_buckets_gives_torchs_adamw(
    monkeypatch: pytest.MonkeyPatch, bucket_bytes: int, stream: type
) -> None:
    """Copies that come late are waited for."""
    monkeypatch.setattr(adamw_offload, "CopyStream", stream)
    ours, weights = made(bucket_bytes)
    config, expected = OptimizerConfig(), [torch.nn.Parameter(w.clone()) for w in weights]
    theirs = torch.optim.AdamW(
        [{"params": expected[0::2], "weight_decay": 0.3}, {"params": expected[1::2], "weight_decay": 0.0}],
        lr=0.1,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    for step in range(1, 5):
        gradients = tensors(step)
        for parameter, gradient in zip(expected, gradients, strict=True):
            parameter.grad = gradient.clone()
        ours.step(gradients, 0.1, step)
        theirs.step()
    for number, (found, wanted) in enumerate(zip(weights, expected, strict=True)):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-13, atol=1e-14)
        for moment in ("exp_avg", "exp_avg_sq"):
            kept = ours.moments[moment][f"w{number}"]
            torch.testing.assert_close(kept, theirs.state[wanted][moment], rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("bucket_bytes", [8 * 7, 8 * 20, 2**20])
def test_gradients_go_down_and_updates_come_back_once(
    monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    """All that crosses, and what is taken on both sides: moments never leave the host."""
    crossed: list[tuple[int, int, int]] = []
    host: list[Tensor] = []
    plain_copy, plain_zeros = CopyStream.copy, adamw_offload.host_zeros

    def copy(self: CopyStream, target: Tensor, source: Tensor) -> None:
        crossed.append((target.data_ptr(), source.data_ptr(), source.nbytes))
        return plain_copy(self, target, source)

    def zeros(*given: object) -> Tensor:
        host.append(plain_zeros(*given))  # type: ignore[arg-type]
        return host[-1]

    monkeypatch.setattr(CopyStream, "copy", copy)
    monkeypatch.setattr(adamw_offload, "host_zeros", zeros)
    ours, weights = made(bucket_bytes)
    total = sum(weight.nbytes for weight in weights)
    held = {x.untyped_storage().data_ptr() for values in ours.moments.values() for x in values.values()}
    has_gpus = {x.untyped_storage().data_ptr() for x in host}
    assert held < has_gpus, "every moment lies in memory that was asked for as the host's"
    moments = sum(x.nbytes for x in host if x.untyped_storage().data_ptr() in held)
    assert moments == 2 * total
    staging = sum(x.nbytes for x in host) - moments
    assert staging <= 4 * min(bucket_bytes, total)

    def inside(address: int) -> bool:
        return any(x.data_ptr() <= address < x.data_ptr() + x.nbytes for x in host)

    ours.step(tensors(1), 0.1, 1)
    down = [size for target, source, size in crossed if inside(target) and not inside(source)]
    up = [size for target, source, size in crossed if inside(source) and not inside(target)]
    assert sum(down) == sum(up) == total
    assert len(down) + len(up) == len(crossed)
    assert max(down) <= bucket_bytes


def test_the_host_works_on_what_has_come_and_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a bucket's update it waits for its gradients, and for the buffer's update before to be sent.

    One fused kernel updates each bucket, with the threads that the host may use; then it has its own again.
    """

    class Event:
        waited = False

        def synchronize(self) -> None:
            self.waited = True

    class Stream(CopyStream):
        def copy(self, target: Tensor, source: Tensor) -> Event:
            target.copy_(source)
            return Event()

        def follow(self, event: object) -> None:
            pass

    monkeypatch.setattr(adamw_offload, "CopyStream", Stream)
    ours, _ = made(8 * 20)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    returned: list[object] = []
    plain = OffloadedAdamW._update

    def update(self: OffloadedAdamW, bucket: Any, slot: Any, rate: float, step: int) -> None:
        assert slot.arrived.waited
        assert slot.returned is None or slot.returned.waited
        returned.append(slot.returned)
        plain(self, bucket, slot, rate, step)

    monkeypatch.setattr(OffloadedAdamW, "_update", update)
    with Operators() as seen:
        for step in (1, 2):
            ours.step(tensors(step), 0.1, step)
    count = len(ours._buckets)
    assert seen.names.count("_fused_adamw_") == 2 * count
    assert [event is None for event in returned] == [True, True, *[False] * (2 * count - 2)]
    assert threads == [THREADS, torch.get_num_threads()] * (2 * count)


@pytest.mark.usefixtures("small_buckets")
def test_the_engine_with_many_buckets_equals_the_one_without() -> None:
    states = []
    for job in (make_job("adamw", 6), offloaded(make_job("adamw", 6))):
        engine = build_engine(job, Layout(micro_batch=6), 0, None, CPU)
        engine.initialise(0)
        for step in range(1, 4):
            engine.gradients_of(batch(job, engine.layout, 0, step))
            engine.optimizer_step(0.01)
        states.append({entry.shard.name: entry.tensor.clone() for entry in engine.state()})
        if job.optimizer.offload:
            assert len(engine._optimizer._rules[0]._buckets) > 10  # type: ignore[attr-defined]
        engine.close()
    assert list(states[0]) == list(states[1]), "the same canonical names, in the same order"
    for name, found in states[1].items():
        torch.testing.assert_close(found, states[0][name], rtol=1e-11, atol=1e-13, msg=name)
