"""Benchmarks of data in a short form: what they feed, and what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from picotron_ray.bench.data import curriculum, packing


def test_sums_are_right_and_most_are_long(tmp_path: Path) -> None:
    curriculum.write_sums(tmp_path / "sums.jsonl", 3, 500)
    long = 0
    for line in (tmp_path / "sums.jsonl").read_text().splitlines():
        record = json.loads(line)
        one, other = record["question"].rstrip("=").split("+")
        assert int(one[::-1]) + int(other[::-1]) == int(record["answer"][::-1])
        long += len(one) == 3
    assert 350 < long < 450


def test_both_orders_are_fed_until_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curriculum, "DOCUMENTS", 400)
    monkeypatch.setattr(
        curriculum, "write_sums", lambda path, seed, write=curriculum.write_sums: write(path, seed, 400)
    )
    found = curriculum.bench(1, 20, lambda line: None)
    (seed,) = found["seeds"]
    assert not found["reached"]
    assert seed["uniform"]["tokens"] > 1.3 * seed["curriculum"]["tokens"], "20 steps of the shortest sums"
    text = "\n".join(curriculum.lines(found))
    assert f"curriculum over uniform order: {found['median_ratio']:.3f}" in text
    assert "and not there" in text


def test_packed_and_padded_rows_hold_the_same_documents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packing, "CORPUS", 150)
    documents = packing.write_tokens(tmp_path)
    assert len(documents) == 50
    batch = next(packing._padded(documents))
    assert batch.counted is not None
    real = batch.counted.sum(axis=-1)[0] + 1
    assert batch.tokens.shape[-1] == real.max()
    assert batch.global_tokens == int((real - 1).sum())
    lengths = packing.document_lengths(100_000)
    assert lengths.mean() == pytest.approx(packing.MEAN, rel=0.05)


@pytest.mark.deep
def test_both_sides_are_measured() -> None:
    found = packing.bench(1, 16, lambda line: None)
    assert min(found["tokens_per_s"].values()) > 0
    assert "packed over padded" in packing.lines(found)[-1]
