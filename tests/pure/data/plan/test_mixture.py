"""Mixtures: shares, each sample once an epoch, and any row without those before it."""

from __future__ import annotations

import numpy as np
import pytest

from picotron_ray.config.support.mixture import CYCLE, quotas
from picotron_ray.data.plan.mixture import Mixture, MixturePlan, Stretch
from picotron_ray.data.plan.order import SampleOrder, Shuffled


def mixture(*stretches: tuple[int, tuple[float, ...]]) -> Mixture:
    return Mixture(5, tuple(Stretch(first, quotas(weights)) for first, weights in stretches))


def orders(*counts: int) -> tuple[SampleOrder, ...]:
    return tuple(Shuffled(seed, count) for seed, count in enumerate(counts, 1))


def test_quotas_share_a_cycle_and_refuse_what_has_no_row() -> None:
    rng = np.random.default_rng(0)
    for count in (1, 2, 7, 300):
        weights = rng.uniform(0.01, 1, count)
        shares = np.array(quotas(weights.tolist()))
        assert shares.sum() == CYCLE
        assert np.abs(shares - weights / weights.sum() * CYCLE).max() < 1
    for wrong in ([0.0, 1.0], [-1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        with pytest.raises(ValueError, match="expected positive numbers"):
            quotas(wrong)
    with pytest.raises(ValueError, match="saw weight 1e-06 of 1 in all"):
        quotas([1.0, 1e-6])


def test_rows_are_dealt_by_weight_and_numbered_without_gaps() -> None:
    dealer = mixture((0, (0.7, 0.2, 0.1)))
    rows = 3 * CYCLE + 1000
    sources, numbers = dealer.deal(0, rows)
    counts = np.bincount(sources)
    assert np.abs(counts / rows - [0.7, 0.2, 0.1]).max() < 2e-3
    for source in range(3):
        assert np.array_equal(numbers[sources == source], np.arange(counts[source]))
    assert np.array_equal(dealer.used(rows), counts)
    assert np.abs(np.bincount(sources[:200]) / 200 - [0.7, 0.2, 0.1]).max() < 0.12, "mixed, not in turns"


def test_any_rows_are_found_without_those_before() -> None:
    dealer = mixture((0, (0.5, 0.5)), (70_001, (0.9, 0.1)), (70_300, (0.2, 0.8)))
    sources, numbers = dealer.deal(0, 150_000)
    for first, last in (
        (0, 0),
        (69_990, 70_400),
        (70_301, 70_302),
        (CYCLE - 3, CYCLE + 3),
        (135_000, 150_000),
    ):
        part = dealer.deal(first, last)
        assert np.array_equal(part[0], sources[first:last])
        assert np.array_equal(part[1], numbers[first:last])
    for source in range(2):
        mine = numbers[sources == source]
        assert np.array_equal(mine, np.arange(len(mine))), "weights change, and no sample is lost or repeated"
    for rows in (0, 1, 70_001, 70_300, 149_999):
        assert np.array_equal(dealer.used(rows), np.bincount(sources[:rows], minlength=2))
    late = sources[70_300:]
    assert abs(late.mean() - 0.8) < 0.01


def test_each_source_is_shuffled_anew_in_its_own_epochs() -> None:
    counts = (10, 7)
    plan = MixturePlan(4, orders(*counts), mixture((0, (0.75, 0.25))))
    assert plan.numbers(3) == (8, 12)
    rows = 400
    ids = plan.samples(0, rows)
    sources = (ids >= counts[0]).astype(int)
    samples = ids - sources * counts[0]
    for source, count in enumerate(counts):
        mine = samples[sources == source]
        epochs = [mine[at : at + count] for at in range(0, len(mine) - count + 1, count)]
        assert all(sorted(epoch.tolist()) == list(range(count)) for epoch in epochs)
        assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1
    for first, last in ((0, 3), (17, 61), (399, 400)):
        assert np.array_equal(plan.samples(first, last), ids[first:last])


def test_a_source_more_leaves_the_order_within_the_others() -> None:
    two = MixturePlan(4, orders(50, 50), mixture((0, (0.5, 0.5))))
    three = MixturePlan(4, orders(50, 50, 50), mixture((0, (0.4, 0.4, 0.2))))
    for source in range(2):
        first, second = (plan.samples(0, 300) for plan in (two, three))
        one, other = (ids[ids // 50 == source] for ids in (first, second))
        both = min(len(one), len(other))
        assert np.array_equal(one[:both], other[:both])
