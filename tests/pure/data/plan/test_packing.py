"""Packing: each piece in one row, no row too full, little of it empty, and the same rows each time."""

from __future__ import annotations

import numpy as np
import pytest

from picotron_ray.data.plan import packing
from picotron_ray.data.plan.packing import LongDocuments, pack, pieces_of


def log_normal(count: int, mean: float = 300.0) -> np.ndarray:
    sigma = 1.0
    rng = np.random.default_rng(1)
    return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count), 2, 2048).astype(np.int64)


def test_each_piece_is_in_one_row_and_no_row_is_too_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "OPEN_ROWS", 8)
    lengths = log_normal(10_000)
    rows = pack(lengths, 2049, seed=3)
    assert sorted(rows.order.tolist()) == list(range(len(lengths)))
    fullness = np.add.reduceat(lengths[rows.order], rows.offsets[:-1])
    assert fullness.max() <= 2049
    assert len(fullness) == len(rows)


def test_rows_are_nearly_full() -> None:
    lengths = log_normal(20_000)
    assert lengths.sum() / (len(pack(lengths, 2049, seed=0)) * 2049) > 0.98


def test_rows_follow_from_seed_and_lengths() -> None:
    lengths = log_normal(5_000)
    one, same, other = (pack(lengths, 2049, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.order, same.order)
    assert np.array_equal(one.offsets, same.offsets)
    assert not np.array_equal(one.order[:100], other.order[:100])


@pytest.mark.parametrize("how", ["split", "truncate", "drop"])
def test_long_documents_are_dealt_with_as_asked_and_counted(how: LongDocuments) -> None:
    lengths = np.array([5, 1, 12, 9, 2, 10, 30])
    borders = np.concatenate([[0], np.cumsum(lengths)])
    found = pieces_of(borders, 9, how)
    assert found.lengths.max() <= 9
    assert found.lengths.min() >= 2
    assert (found.cut, found.parted) == ((0, 3) if how == "split" else (3, 0))
    predicted = {
        at
        for start, size in zip(found.starts, found.lengths, strict=True)
        for at in range(start + 1, start + size)
    }
    every = {
        at for start, size in zip(borders, lengths, strict=False) for at in range(start + 1, start + size)
    }
    if how == "split":
        assert predicted == every
        assert sum(found.lengths - 1) == len(every), "each token is predicted once"
    elif how == "truncate":
        assert predicted == {
            at
            for start, size in zip(borders, lengths, strict=False)
            for at in range(start + 1, start + min(9, size))
        }
    else:
        assert found.starts.tolist() == [0, 18, 27]


def test_a_piece_that_fits_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="saw a piece of 12 tokens, expected at most 9"):
        pack(np.array([3, 12]), 9, seed=0)
    assert len(pack(np.array([], np.int64), 9, seed=0)) == 0
