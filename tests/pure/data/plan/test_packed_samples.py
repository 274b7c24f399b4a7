"""Packed samples: what stands in a row, what counts, and the cache of the rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data.batch import make_batch
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.plan import packed_cache
from picotron_ray.data.plan.packed_cache import PackRequest, document_borders, packed_rows
from picotron_ray.data.plan.packed_samples import PackedSamples
from picotron_ray.data.samples import PADDING
from picotron_ray.errors import DataError
from picotron_ray.layout.layout import Layout

END, SEQ = 9, 7
REQUEST = PackRequest("digest", END, SEQ, 3, "split")


def stream(lengths: list[int], seed: int = 0) -> np.ndarray:
    """Documents of these lengths, their end token included."""
    rng = np.random.default_rng(seed)
    return np.concatenate([[*rng.integers(1, 9, size - 1), END] for size in lengths]).astype("<u2")


LENGTHS = np.random.default_rng(4).integers(1, 12, 60).tolist()
TOKENS = stream(LENGTHS)


def samples(folder: Path, tokens: np.ndarray = TOKENS, mask: np.ndarray | None = None) -> PackedSamples:
    return PackedSamples(tokens, SEQ, *packed_rows(tokens, REQUEST, folder, None, mask), END, mask)


def test_borders_of_documents() -> None:
    assert document_borders(np.array([1, 9, 2, 3, 9], "<u2"), 9).tolist() == [0, 2, 5]
    assert document_borders(np.array([1, 9, 2], "<u2"), 9).tolist() == [0, 2, 3], "the last one has no end"
    assert document_borders(np.array([], "<u2"), 9).tolist() == [0]


def test_every_token_that_follows_another_of_its_document_is_predicted_once(tmp_path: Path) -> None:
    data = samples(tmp_path)
    every = np.arange(data.samples)
    rows, counted, documents = data.rows(every), data.counted(every), data.documents(every)
    assert int(counted.sum()) == sum(size - 1 for size in LENGTHS) == data.totals(every)[0]
    assert data.mean_tokens == pytest.approx(counted.sum() / data.samples)
    assert ((documents == PADDING).sum(axis=1) < SEQ - 1).all()
    assert (rows[:, :-1][documents == PADDING] == END).all()
    assert not counted[documents == PADDING].any()
    for row, mask, numbers in zip(rows, counted, documents, strict=True):
        for number in range(numbers.max() + 1):
            inside = np.flatnonzero(numbers == number)
            assert mask[inside[:-1]].all(), "all of a document's tokens but its first"
            if inside[-1] + 1 < SEQ:
                assert not mask[inside[-1]], "none of the next document's"
                assert END not in row[inside[:-1]]


def test_masks_of_the_source_hold_too(tmp_path: Path) -> None:
    mask = np.random.default_rng(1).integers(0, 2, len(TOKENS)).astype(np.uint8)
    data, plain = samples(tmp_path, mask=mask), samples(tmp_path)
    every = np.arange(data.samples)
    lengths = np.array(LENGTHS)
    firsts = np.cumsum(lengths) - lengths
    expected = int(mask.sum() - mask[firsts].sum())
    assert int(data.counted(every).sum()) == expected
    assert not (data.counted(every) & ~plain.counted(every)).any()
    assert data.totals(every) == (plain.totals(every)[0], expected)


def test_rows_are_made_once_and_again_where_they_are_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = samples(tmp_path)
    made: list[int] = []
    pack = packed_cache.pack
    monkeypatch.setattr(packed_cache, "pack", lambda *given: made.append(1) or pack(*given))
    again = samples(tmp_path)
    assert made == []
    every = np.arange(first.samples)
    assert np.array_equal(again.rows(every), first.rows(every))
    (place,) = tmp_path.glob("packed-*[0-9a-f]")
    for harm in ("meta.json", "order.npy"):
        (place / harm).write_bytes((place / harm).read_bytes()[:40])
        assert np.array_equal(samples(tmp_path).rows(every), first.rows(every))
    assert len(made) == 2
    other = packed_rows(TOKENS, replace(REQUEST, seed=4), tmp_path)[1]
    assert not np.array_equal(other.order, first.packed.order)


def test_long_documents_are_refused_until_something_is_asked_for_them(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data.long_documents: \d+ documents are longer than the 8 tokens that"
    ):
        packed_rows(TOKENS, replace(REQUEST, long_documents=None), tmp_path)
    assert not list(tmp_path.glob("packed-*.new"))
    short = stream([3, 8, 5])
    assert len(packed_rows(short, replace(REQUEST, long_documents=None), tmp_path)[1]) == 2
    with pytest.raises(DataError, match="no document has two tokens and fits a row"):
        packed_rows(stream([12, 1]), replace(REQUEST, long_documents="drop"), tmp_path)


def config(folder: Path, **more: object) -> DataConfig:
    lines = [json.dumps({"text": "abcdefghij"[: 1 + at % 9]}) for at in range(200)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    words = {"source": "jsonl", "path": str(folder / "texts.jsonl"), "sequence_length": 16, "global_batch": 6}
    return DataConfig.model_validate({**words, "batching": "packed", **more})


def test_a_run_feeds_packed_rows(tmp_path: Path) -> None:
    found = build_dataset(config(tmp_path), 300, 5, tmp_path / "cache")
    layout = Layout(dp=2, micro_batch=2)
    for step in (1, 2, 40):
        parts = [make_batch(found.feed, layout, index, step) for index in range(2)]
        counted = sum(int(part.counted.sum()) for part in parts if part.counted is not None)
        assert {part.global_tokens for part in parts} == {counted} == {part.global_counted for part in parts}
        assert all(part.documents is not None and part.documents.shape == (2, 2, 16) for part in parts)
    assert abs(parts[0].tokens_until - 40 * 6 * found.train.mean_tokens) <= 1
    (note,) = found.notes
    assert "documents or parts of them put into" in note
    assert "rows of 17 tokens" in note
    fixed = build_dataset(config(tmp_path, batching="fixed"), 300, 5, tmp_path / "cache")
    other = build_dataset(config(tmp_path, long_documents="drop"), 300, 5, tmp_path / "cache")
    assert len({found.fingerprint, fixed.fingerprint, other.fingerprint}) == 3
