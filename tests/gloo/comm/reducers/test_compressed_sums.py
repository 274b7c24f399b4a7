"""Compressed reducers: what is not sent is owed, to the bit of rounding; bytes are what the ratio says."""

from __future__ import annotations

import math

import pytest
import torch

from picotron_ray.comm.reducers.choose import ReductionPlan
from picotron_ray.comm.reducers.codecs import BLOCK, Bf16, Codec, Quantized, TopK
from picotron_ray.comm.reducers.feedback import Feedback
from tests.support.gloo.parallel_jobs.reducer_jobs import compressed
from tests.support.gloo.pool import Pool

SHAPE = (96, 128)
STEPS = 3
SHARE = {  # of the bytes of an exact ring, at most
    ReductionPlan("int8"): 0.26,
    ReductionPlan("int8", bits=4): 0.135,
    ReductionPlan("bf16"): 0.501,
    ReductionPlan("topk"): 0.505,
    ReductionPlan("topk", ratio=0.03): 0.031,
    ReductionPlan("powersgd"): 0.501,
    ReductionPlan("powersgd", ratio=0.1): 0.101,
}


@pytest.mark.parametrize("plan", SHARE, ids=lambda plan: f"{plan.gradients}-{plan.bits}-{plan.ratio}")
def test_nothing_is_lost(pool: Pool, plan: ReductionPlan) -> None:
    ranks = 3
    per_rank = pool.run(ranks, compressed, plan, SHAPE, STEPS)
    owed = torch.zeros(SHAPE[0] * SHAPE[1])
    for step in range(STEPS):
        put = sum(found[step][0] for found in per_rank)
        results = [found[step][1] for found in per_rank]
        assert all(torch.equal(result, results[0]) for result in results)
        after = sum(found[step][2] for found in per_rank) / ranks
        torch.testing.assert_close(results[0] + after, put + owed, rtol=0, atol=1e-4)
        assert 0 < float(after.norm()) < 2.0 * float(put.norm())
        owed = after
        exact = 2 * (ranks - 1) / ranks * 4 * put.numel()
        assert all(found[step][3] <= SHARE[plan] * exact * 1.02 for found in per_rank)
    for found in per_rank:
        torch.testing.assert_close(found[STEPS][2], owed, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("bits", "step"), [(8, 127), (4, 7)])
def test_the_error_of_a_code_is_half_a_step(bits: int, step: int) -> None:
    rows = torch.randn(2, 1000)
    codec = Quantized(bits)
    wire = codec.encode(rows)
    assert wire.shape == (2, 1024 * bits // 8 + 4 * 4)
    found = codec.decode(wire, 1000)
    blocks = torch.nn.functional.pad(rows, (0, 24)).view(2, -1, BLOCK)
    most = blocks.abs().amax(-1, keepdim=True).expand_as(blocks).reshape(2, -1)[:, :1000]
    assert ((found - rows).abs() <= most / (2 * step) * 1.0001).all()
    zeros = torch.zeros(1, 5)
    assert torch.equal(codec.decode(codec.encode(zeros), 5), zeros)


@pytest.mark.parametrize("ratio", [0.5, 0.3, 0.03, 1e-6])
def test_the_largest_values_keep_their_signs_and_places(ratio: float) -> None:
    rows = torch.tensor([[0.5, -3.0, 1.0, 0.125, -0.25, 2.0, 0.75, 1.5, -4.0] * 20, [1.0] * 180])
    codec = TopK(ratio)
    kept = codec.kept(180)
    found = codec.decode(codec.encode(rows), 180)
    assert (found != 0).sum(dim=1).tolist() == [kept, kept]
    assert torch.equal(found[found != 0], rows[found != 0])
    assert float(found[0].abs().sum()) == pytest.approx(float(rows[0].abs().topk(kept).values.sum()))
    assert kept >= 1


@pytest.mark.parametrize(
    "codec", [Bf16(), Quantized(8), Quantized(4), TopK(0.5)], ids=lambda c: type(c).__name__
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(codec: Codec, bad: float) -> None:
    rows = torch.ones(1, 512)
    rows[0, 300] = bad
    assert not codec.decode(codec.encode(rows), 512).isfinite().all()


def test_an_error_counts_once_its_update_is_applied() -> None:
    feedback = Feedback(torch.zeros(2), 4)
    feedback.begin(8.0)
    feedback.keep(torch.tensor([2.0, -4.0]))
    assert feedback.owed.tolist() == [0.0, 0.0]
    feedback.begin(4.0)  # the step again, with half the loss scale
    feedback.keep(torch.tensor([1.0, -3.0]))
    feedback.commit()
    assert feedback.owed.tolist() == [1.0, -3.0], "of four ranks, and scaled by four"
    feedback.begin(1.0)
    feedback.commit()
    assert feedback.owed.tolist() == [1.0, -3.0], "a step without a sum leaves it"
    gradients = torch.zeros(2)
    feedback.add_to_(gradients)
    assert gradients.tolist() == [0.25, -0.75]
