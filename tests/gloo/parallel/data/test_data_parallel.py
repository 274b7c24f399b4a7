"""What data parallelism sends and when; loss scaling, which all ranks must decide alike."""

from __future__ import annotations

import math

import pytest
import torch

from picotron_ray.layout.layout import Layout
from picotron_ray.train.engine import build_engine
from picotron_ray.train.precision.loss_scaler import GROWTH_STEPS, INITIAL_SCALE, LossScaler
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, MODEL, assemble, batch, make_job
from tests.support.gloo.parity import reference, worst
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.data_jobs import collectives, overlapped, scaled

MICRO_BATCHES = 3
UNITS = MODEL.layers + 2  # every block, embedding and head
PASSES = 2 * MODEL.layers + 2  # blocks are gathered for backward again


@pytest.mark.parametrize(
    ("layout", "gathers", "scatters", "sums"),
    [
        (Layout(dp=2, micro_batch=2), 0, 0, 1),
        (Layout(dp=2, zero=1, micro_batch=2), UNITS, UNITS, 0),
        (Layout(dp=2, zero=2, micro_batch=2), UNITS, UNITS * MICRO_BATCHES, 0),
        (Layout(dp=2, zero=3, micro_batch=2), PASSES * MICRO_BATCHES, UNITS * MICRO_BATCHES, 0),
        (Layout(dp=4, zero=2, replicate=2, micro_batch=1), UNITS, UNITS * MICRO_BATCHES, UNITS),
    ],
    ids=str,
)
def test_what_goes_over_the_wire_in_a_step(
    pool: Pool, layout: Layout, gathers: int, scatters: int, sums: int
) -> None:
    counts = pool.run(layout.world_size, collectives, make_job("sgd", 12), layout)[0]
    found = [counts.get(name, 0) for name in ("_allgather_base_", "alltoall_base_", "allreduce_")]
    assert found == [gathers, scatters, sums]


def test_sums_set_off_while_the_backward_pass_goes_on(pool: Pool) -> None:
    layout = Layout(dp=2, micro_batch=2)
    for buckets, started in pool.run(2, overlapped, make_job("sgd", 12), layout, 4096):
        assert buckets > 3
        assert started == [0] * MICRO_BATCHES + [buckets], "with the last micro-batch, and before its end"


@pytest.mark.deep
def test_an_overflow_repeats_the_step_with_half_the_scale(pool: Pool) -> None:
    """Every rank decides alike, nothing is skipped, and the gradient is the one of fp32 but for rounding."""
    job = make_job("sgd", 12, precision="fp16")
    expected = assemble([reference("sgd", 12).gradients])
    layout = Layout(dp=2, tp=2, zero=3, micro_batch=2)
    ranks = pool.run(4, scaled, job, layout, 2.0**40)
    norm, (scale, steps), _ = ranks[0]
    assert all(rank[:2] == ranks[0][:2] for rank in ranks)
    assert math.isfinite(norm)
    assert 1.0 <= scale < 2.0**40
    assert steps == 1.0
    clipped = {name: value * (0.5 / norm) for name, value in expected.items()}
    far, name = worst(assemble([rank[2] for rank in ranks]), clipped)
    assert far < 0.05, name


def test_fp16_learns_what_fp32_does() -> None:
    losses: dict[str, list[float]] = {}
    for precision in ("fp32", "fp16"):
        job = make_job("adamw", 12, precision=precision)
        engine = build_engine(job, Layout(micro_batch=12), 0, None, CPU)
        engine.initialise(0)
        found = []
        for _ in range(6):
            found.append(float(engine.gradients_of(batch(job, Layout(micro_batch=12), 0, 1))[0]))
            engine.optimizer_step(0.01)
        losses[precision] = found
        assert {item.tensor.dtype for item in engine.state()} == {torch.float32}
        engine.close()
    assert losses["fp16"] != losses["fp32"], "fp16 computed in fp32"
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=0.01)


def test_the_scale_grows_shrinks_and_is_written_with_the_weights() -> None:
    scaler = LossScaler(CPU)
    scaler.initialise()
    scaler.begin()
    assert not scaler.fits(math.inf)
    assert scaler.fits(3.0)
    assert scaler.state.tolist() == [INITIAL_SCALE, 0.0], "what is not committed did not happen"
    scaler.step()
    assert scaler.state.tolist() == [INITIAL_SCALE / 2, 1.0]
    for _ in range(GROWTH_STEPS - 1):
        scaler.begin()
        assert scaler.fits(1.0)
        scaler.step()
    assert scaler.state.tolist() == [INITIAL_SCALE, 0.0]
    scaler.state[0] = 1.0
    scaler.begin()
    assert scaler.fits(math.nan), "a training that has no finite gradient is not the format's fault"
