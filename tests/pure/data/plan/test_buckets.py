"""Length buckets: documents of about one length share a row, each in its slot, whatever the batch size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.data.batch import make_batch
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.data.plan.buckets import bucket_widths, fill_buckets
from picotron_ray.data.plan.packing import pack
from picotron_ray.data.samples import PADDING
from picotron_ray.errors import ConfigError, DataError
from picotron_ray.layout.layout import Layout

LENGTHS = np.random.default_rng(4).lognormal(2.5, 0.8, 3000).astype(np.int64).clip(2, 129)


@pytest.mark.parametrize("most", [None, 1, 3])
def test_each_document_is_in_the_narrowest_slot_that_holds_it(most: int | None) -> None:
    widths = bucket_widths(129)
    rows = fill_buckets(LENGTHS, 129, 1, widths, most)
    assert rows.slots is not None
    seen = np.concatenate([rows.row(at) for at in range(len(rows))])
    assert sorted(seen.tolist()) == list(range(len(LENGTHS))), "each document once"
    part_filled = 0
    for at in range(len(rows)):
        mine, slot = LENGTHS[rows.row(at)], int(rows.slots[at])
        assert slot == min(width for width in widths if width >= mine.max())
        assert all(mine > max((width for width in widths if width < slot), default=0))
        assert len(mine) * slot <= 129
        assert most is None or len(mine) <= most
        part_filled += len(mine) < min(129 // slot, most or 129)
    assert part_filled <= len(widths), "the last row of each bucket"
    other = fill_buckets(LENGTHS, 129, 2, widths, most)
    assert not np.array_equal(other.order, rows.order), "drawn by the seed"
    assert len(np.unique(np.diff(rows.order))) > 100, "not sorted within a bucket"


def test_packing_may_be_bound_to_some_documents_a_row() -> None:
    rows = pack(LENGTHS, 129, 0, most=2)
    counts = np.diff(rows.offsets)
    assert counts.max() == 2
    assert sorted(rows.order.tolist()) == list(range(len(LENGTHS)))


def job_of(folder: Path, **data: Any) -> Any:
    words = {"source": "jsonl", "path": str(folder / "a.jsonl"), "sequence_length": 32, "global_batch": 6}
    return parse_job({"model": {"vocab_size": 260}, "data": {**words, "batching": "buckets", **data}})


def opened(folder: Path, **data: Any) -> DataSplits:
    texts = [chr(97 + at % 26) * (1 + at * 7 % 31) for at in range(400)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    job = job_of(folder, **data)
    return build_dataset(job.data, 260, 0, folder / "cache")


def test_rows_hold_slots_with_padding_between_that_counts_nowhere(tmp_path: Path) -> None:
    found = opened(tmp_path)
    assert "rows of 33 tokens" in found.notes[0]
    batch = make_batch(found.feed, Layout(micro_batch=6), 0, 1)
    assert batch.documents is not None
    assert batch.counted is not None
    between = 0
    for tokens, documents, counted in zip(batch.tokens[0], batch.documents[0], batch.counted[0], strict=True):
        for number in range(documents.max() + 1):
            (places,) = np.nonzero(documents == number)
            text = tokens[places]
            assert len(set(text[:-1].tolist())) <= 1, "one letter a document"
            assert text[-1] == 256 or places[-1] == 31, "its end, or the row's"
            assert counted[places[:-1]].all()
        padded = documents == PADDING
        between += int((np.diff(padded.astype(int)) == -1).sum())
        assert not counted[padded].any()
    assert between, "padding lies between documents too"
    assert batch.global_tokens == int(batch.counted.sum())
    parts = [make_batch(found.feed, Layout(dp=3, micro_batch=1), at, 1) for at in range(3)]
    assert np.array_equal(
        np.concatenate([part.tokens.reshape(-1, 33) for part in parts]), batch.tokens.reshape(-1, 33)
    )


def test_own_buckets_say_what_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"longer than the 16 tokens that one may have.*say split"):
        opened(tmp_path, buckets=[8, 16])
    cut = opened(tmp_path, buckets=[8, 16], long_documents="truncate", max_batch_size=13)
    assert isinstance(cut.notes[0], str)
    assert "cut or left out as too long" in cut.notes[0]
    documents = make_batch(cut.feed, Layout(micro_batch=6), 0, 1).documents
    assert documents is not None
    assert documents.max() == 1, "two of 13 / 6 a row"
    assert cut.fingerprint != opened(tmp_path, buckets=[8, 16], long_documents="truncate").fingerprint


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"buckets": [16, 8]}, "data.buckets: saw [16, 8], expected ascending slots of 2 to 33 tokens"),
        ({"buckets": [8, 40]}, "expected ascending slots of 2 to 33"),
        ({"buckets": [8], "batching": "packed"}, "data.buckets: saw [8] with data.batching=packed"),
        ({"max_batch_size": 5}, "data.max_batch_size: saw 5, expected at least data.global_batch=6"),
        ({"max_batch_size": 9, "batching": "fixed"}, "data.max_batch_size: saw 9 with data.batching=fixed"),
        ({"global_tokens": 100}, "data.global_tokens: saw 100, expected global_batch=6 rows of 32"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, data: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job_of(tmp_path, **data)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_rows_follow_from_the_tokens_of_a_step() -> None:
    data = parse_job({"data": {"global_tokens": 4096, "sequence_length": 512}}).data
    assert data.global_batch == 8
    assert parse_job({"data": data.model_dump()}).data == data
    assert parse_job({"data": {"global_tokens": 1280}}).data.global_batch == 10
    with pytest.raises(ConfigError, match=r"global_tokens: saw 100, expected global_batch=1 rows of 128"):
        parse_job({"data": {"global_tokens": 100}})
