"""The order of samples: a permutation, the same for ever, independent of who asks."""

from __future__ import annotations

import numpy as np
import pytest

from picotron_ray.data.shuffle import ORDER_VERSION, sample_index, samples_between


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 64, 65, 1000, 4097, 78925])
@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 0), (0, 3)])
def test_every_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    order = sample_index(seed, epoch, np.arange(n), n)
    assert np.array_equal(np.sort(order), np.arange(n))


def test_recorded_order() -> None:
    """Any change of the order changes every run of the same seed: it needs a new ORDER_VERSION."""
    assert ORDER_VERSION == 1
    assert sample_index(7, 2, np.arange(10), 100).tolist() == RECORDED
    for order in RECORDED_SMALL:
        assert sample_index(7, 2, np.arange(len(order)), len(order)).tolist() == order


RECORDED = [44, 68, 99, 65, 37, 0, 5, 9, 36, 75]
RECORDED_SMALL = [  # on both sides of 4 and 16, where the network gets wider
    [1, 2, 0],
    [1, 3, 0, 2],
    [0, 3, 1, 2, 4],
    [5, 7, 1, 2, 10, 11, 13, 3, 14, 9, 4, 6, 8, 15, 0, 12],
    [4, 0, 1, 6, 16, 3, 15, 11, 12, 10, 14, 13, 5, 8, 7, 9, 2],
]


def test_seeds_and_epochs_differ() -> None:
    orders = {tuple(sample_index(s, e, np.arange(50), 50).tolist()) for s in range(5) for e in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize("n", [1000, 1024, 1025])
def test_order_looks_random(n: int) -> None:
    """Neighbours do not stay neighbours."""
    order = sample_index(3, 0, np.arange(n), n)
    correlation = np.corrcoef(np.arange(n), order)[0, 1]
    assert abs(correlation) < 0.12
    assert (np.abs(np.diff(order)) == 1).mean() < 0.01


def test_first_sample_is_equally_likely() -> None:
    firsts = np.bincount([int(sample_index(s, 0, 0, 8)) for s in range(400)], minlength=8)
    assert ((firsts - 50) ** 2 / 50).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


def test_positions_one_by_one_and_in_any_shape() -> None:
    whole = sample_index(1, 1, np.arange(60), 77)
    assert [int(sample_index(1, 1, p, 77)) for p in range(60)] == whole.tolist()
    assert sample_index(1, 1, np.arange(60).reshape(3, 20), 77).ravel().tolist() == whole.tolist()


@pytest.mark.parametrize(("position", "n"), [(-1, 5), (5, 5), (0, 0)])
def test_positions_outside_the_epoch_are_refused(position: int, n: int) -> None:
    with pytest.raises(ValueError, match="positions"):
        sample_index(0, 0, position, n)


def test_runs_across_epochs_feed_each_sample_once_per_epoch() -> None:
    n = 13
    pieces = [samples_between(4, a, min(a + 5, 3 * n), n) for a in range(0, 3 * n, 5)]
    fed = np.concatenate(pieces)
    for epoch in range(3):
        assert sorted(fed[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))
    assert np.array_equal(fed, samples_between(4, 0, 3 * n, n))
    assert samples_between(4, 9, 9, n).size == 0
    assert samples_between(4, 0, 40, 1).tolist() == [0] * 40
