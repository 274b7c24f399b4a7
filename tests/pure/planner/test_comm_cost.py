"""Seconds of communication per block and micro-batch, by hand, of groups inside and across nodes."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.layout.layout import Layout
from picotron_ray.planner.comm_cost import NOTHING, context_passes, expert_passes, tensor_passes
from tests.support.runs.by_hand import MIXTURE, UNIT
from tests.support.runs.by_hand import job_by_hand as job

ULYSSES = 6 * (2 * 8 + 2 * 4) / 2 * 4
"""Bytes: half of what 6 tokens have, queries and results 8 wide, keys and values 4."""


@pytest.mark.parametrize(
    ("options", "layout", "nodes", "both", "again"),
    [
        # 12 tokens of 8 values of 4 bytes, half of them or three quarters
        ({}, Layout(tp=2, micro_batch=2), (), 8 * (1.92 + 5), 3 * (1.92 + 5)),
        ({}, Layout(tp=4, micro_batch=2), (4, 8), 8 * (2.88 + 5), 3 * (2.88 + 5)),
        # between nodes, where the two that share one share the traffic
        ({}, Layout(tp=4, micro_batch=2), (4, 6), 8 * (14.4 + 5), 3 * (14.4 + 5)),
        ({"precision": "bf16"}, Layout(tp=2, cp=3, micro_batch=2), (), 8 * (0.32 + 5), 3 * (0.32 + 5)),
        # each of the overlapped ones in three transfers
        (
            {"kernels": {"tp_overlap": "ring"}},
            Layout(tp=4, micro_batch=2),
            (),
            10 * (2.88 + 15),
            4 * (2.88 + 15),
        ),
        (
            {"kernels": {"tp_overlap": "ring"}, "model": MIXTURE},
            Layout(tp=4, micro_batch=2),
            (),
            5 * (2.88 + 15) + 4 * (2.88 + 5),
            2 * (2.88 + 15) + (2.88 + 5),
        ),
    ],
    ids=str,
)
def test_tensor_parallelism(
    options: dict[str, Any], layout: Layout, nodes: tuple[int, ...], both: float, again: float
) -> None:
    assert tensor_passes(job(**options), layout, UNIT, nodes) == pytest.approx((both, again))


@pytest.mark.parametrize(
    ("options", "layout", "nodes", "forward", "back"),
    [
        # two other ranks with 4 tokens of keys and values each, 4 wide; there with their gradients
        ({}, Layout(cp=3, micro_batch=2), (3, 6), 64 * 4 / 100 + 10 + 14 / 3, 64 * 8 / 100 + 20 + 28 / 3),
        ({}, Layout(cp=3, micro_batch=2), (3, 4), 64 * 4 / 10 + 10 + 14 / 3, 64 * 8 / 10 + 20 + 28 / 3),
        (
            {"precision": "bf16"},
            Layout(cp=3, tp=2, micro_batch=2),
            (6, 12),
            32 * 2 / 100 + 10 + 14 / 3,
            32 * 4 / 100 + 20 + 28 / 3,
        ),
        ({}, Layout(cp=3, tp=2, micro_batch=2), (9, 3), 32 * 4 / 10 + 10 + 14 / 3, 32 * 8 / 10 + 20 + 28 / 3),
        # two steps of a collective among four, but one more kernel
        (
            {},
            Layout(cp=4, micro_batch=2, context="all-gather"),
            (),
            72 * 4 / 100 + 10 + 7 / 3,
            72 * 8 / 100 + 20 + 14 / 3,
        ),
        ({}, Layout(cp=4, micro_batch=2), (), 72 * 4 / 100 + 15 + 7, 72 * 8 / 100 + 30 + 14),
        # two exchanges of half of 6 tokens' queries, keys, values and results, each way
        ({}, Layout(cp=2, micro_batch=2, context="ulysses"), (), ULYSSES / 100 + 10, ULYSSES / 100 + 10),
        (
            {},
            Layout(cp=2, tp=2, micro_batch=2, context="ulysses"),
            (2,),
            ULYSSES / 20 + 10,
            ULYSSES / 20 + 10,
        ),
    ],
    ids=str,
)
def test_context_parallelism(
    options: dict[str, Any], layout: Layout, nodes: tuple[int, ...], forward: float, back: float
) -> None:
    """A forward pass that is repeated costs as much as the first one."""
    assert context_passes(job(**options), layout, UNIT, nodes) == pytest.approx((forward + back, forward))


@pytest.mark.parametrize(
    ("options", "layout", "nodes", "seconds", "call"),
    [
        # 12 tokens, each to 2 experts with 8 values of 4 bytes; half of them or three quarters leave
        ({}, Layout(dp=2, ep=2, micro_batch=2), (2, 4), 384 / 100, 5),
        ({}, Layout(dp=4, ep=4, micro_batch=2), (), 576 / 100, 10),
        ({}, Layout(dp=2, ep=2, tp=2, micro_batch=2), (4, 8), 384 / 100, 5),
        ({}, Layout(dp=2, ep=2, tp=3, micro_batch=2), (6,), 384 / 100, 5),
        ({}, Layout(dp=2, ep=2, tp=2, micro_batch=2), (4, 2), 384 / 10, 5),
        ({"precision": "bf16"}, Layout(dp=2, ep=2, cp=3, micro_batch=2), (), 64 / 100, 5),
    ],
    ids=str,
)
def test_expert_parallelism(
    options: dict[str, Any], layout: Layout, nodes: tuple[int, ...], seconds: float, call: float
) -> None:
    """There and back, forward and backward, and the counts; a repeated forward pass brings back nothing."""
    found = expert_passes(job(model=MIXTURE, **options), layout, UNIT, nodes)
    assert found == pytest.approx((4 * seconds + 5 * call, 2 * seconds + 3 * call))


def test_one_rank_sends_nothing() -> None:
    mixture = job(model=MIXTURE)
    for passes in (tensor_passes, context_passes, expert_passes):
        assert passes(mixture, Layout(micro_batch=2), UNIT, (1,)) == NOTHING == (0.0, 0.0)
    assert expert_passes(job(), Layout(dp=2, ep=2), UNIT, (2,)) == NOTHING
