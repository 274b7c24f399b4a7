"""Loss masks from fields of JSON lines: prompts and completions, spans, what is refused, and the order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.schema.data import END_OF_DOCUMENT, DataConfig
from picotron_ray.data.batch import StepBatch
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.data.loader import BatchLoader
from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.errors import DataError
from picotron_ray.layout.layout import Layout

Record = dict[str, Any]
PAIRS: list[Record] = [
    {"q": f"How much is {i} and {i}? ", "text": f"It is {2 * i} €." + "!" * (i % 7)} for i in range(40)
]


def written(folder: Path, records: list[Record]) -> DataConfig:
    """Records in two files; the config that takes prompts from ``q``."""
    for number, part in enumerate((records[::2], records[1::2])):
        (folder / f"{number}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in part))
    return config(folder, prompt_key="q")


def config(folder: Path, **given: Any) -> DataConfig:
    given = {"held_out_fraction": 0.25, "sequence_length": 16, "loss_mask": True, **given}
    return DataConfig(source="jsonl", path=str(folder / "*.jsonl"), **given)


def opened(data: DataConfig, cache: Path) -> DataSplits:
    return build_dataset(data, 264, 3, cache)


def documents(splits: DataSplits) -> Iterator[tuple[bytes, list[int]]]:
    """Each document with its end left out, and its mask with the end."""
    for part in (splits.train, splits.held_out):
        assert part.mask is not None
        assert part.mask.shape == part.tokens.shape
        start = 0
        for end in np.nonzero(part.tokens == END_OF_DOCUMENT)[0]:
            yield part.tokens[start:end].astype("u1").tobytes(), part.mask[start : end + 1].tolist()
            start = int(end) + 1


def test_completions_and_their_ends_count_and_prompts_do_not(tmp_path: Path) -> None:
    splits = opened(written(tmp_path, PAIRS), tmp_path / "cache")
    found = dict(documents(splits))
    assert len(found) == len(PAIRS)
    for record in PAIRS:
        prompt, text = record["q"].encode(), record["text"].encode()
        assert found[prompt + text] == [0] * len(prompt) + [1] * (len(text) + 1)


def test_spans_are_of_characters_and_the_end_counts_where_one_reaches_it(tmp_path: Path) -> None:
    texts = ["a€bé𝄞c", "ab\ud800cd", "xyz"]
    spans = [[[1, 3], [4, 5]], [[0, 1], [2, 5]], [[2, 3]]]
    records = [{"text": text, "s": list(spans[i])} for i, text in enumerate(texts)]
    written(tmp_path, records)
    data = config(tmp_path, spans_key="s", sequence_length=1, held_out_fraction=0.4)
    found = dict(documents(opened(data, tmp_path / "cache")))
    assert found == {
        "a€bé𝄞c".encode(): [0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0],
        b"ab?cd": [1, 0, 1, 1, 1, 1],
        b"xyz": [0, 0, 1, 1],
    }


def test_tokens_and_their_split_are_those_without_masks(tmp_path: Path) -> None:
    """Of one file without documents on one side too, where the masks are cut as the tokens are."""
    one = [{"q": "Count to 99. ", "text": " ".join(map(str, range(100)))}]
    for number, records in enumerate((PAIRS, one)):
        folder = tmp_path / str(number)
        folder.mkdir()
        masked = written(folder, records)
        plain = written(folder, [{"text": record["q"] + record["text"]} for record in records])
        before = opened(plain.model_copy(update={"loss_mask": False, "prompt_key": None}), tmp_path / "cache")
        written(folder, records)
        after = opened(masked, tmp_path / "cache")
        assert before.train.mask is None
        for ours, theirs in ((after.train, before.train), (after.held_out, before.held_out)):
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            assert ours.mask is not None
            assert len(ours.mask) == len(ours.tokens)
        assert after.fingerprint != before.fingerprint


def test_masks_are_part_of_the_fingerprint_and_of_the_cache(tmp_path: Path) -> None:
    spans = [{**record, "a": [[0, 3]], "b": [[1, 3]]} for record in PAIRS]
    written(tmp_path, spans)
    seen = [opened(config(tmp_path, spans_key=key), tmp_path / "cache").fingerprint for key in "aab"]
    assert seen[0] == seen[1] != seen[2]
    for mask in (tmp_path / "cache").glob("*/train.mask"):
        mask.write_bytes(bytes(mask.stat().st_size))
    assert opened(config(tmp_path, spans_key="a"), tmp_path / "cache").fingerprint == seen[0], "built again"
    for mask in (tmp_path / "cache").glob("*/held_out.mask"):
        mask.unlink()
    assert opened(config(tmp_path, spans_key="b"), tmp_path / "cache").fingerprint == seen[2]


@pytest.mark.parametrize(
    ("record", "keys", "words"),
    [
        ({"text": "x"}, {"prompt_key": "q"}, "data.prompt_key: {} has no string under 'q' (seen: keys text)"),
        ({"text": "x", "q": 3}, {"prompt_key": "q"}, "data.prompt_key: {} has no string under 'q'"),
        ({"q": "x"}, {"prompt_key": "q"}, "data.text_key: {} has no string under 'text'"),
        ({"text": "", "q": "x"}, {"prompt_key": "q"}, "data.text_key: {} has an empty string under 'text'"),
        ({"text": "x"}, {"spans_key": "s"}, "data.spans_key: {} has no list under 's' (seen: keys text)"),
        ({"text": "x", "s": []}, {"spans_key": "s"}, "data.spans_key: {} has an empty list under 's', so"),
        ({"text": "ab", "s": [[0, 3]]}, {"spans_key": "s"}, "{} has [0, 3] under 's', expected [start, end]"),
        ({"text": "ab", "s": [[1, 1]]}, {"spans_key": "s"}, "has [1, 1] under 's', expected [start, end]"),
        ({"text": "ab", "s": [[-1, 1]]}, {"spans_key": "s"}, "has [-1, 1] under 's', expected"),
        ({"text": "ab", "s": [[0, True]]}, {"spans_key": "s"}, "has [0, true] under 's', expected"),
        ({"text": "ab", "s": [0, 1]}, {"spans_key": "s"}, "has 0 under 's', expected [start, end]"),
        (
            {"text": "abc", "s": [[1, 2], [0, 1]]},
            {"spans_key": "s"},
            "has [0, 1] under 's', expected [start,",
        ),
        ({"text": "abc", "s": [[0, 2], [1, 3]]}, {"spans_key": "s"}, "with 2 <= start < end <= 3"),
    ],
)
def test_records_that_do_not_say_what_counts_are_refused(
    tmp_path: Path, record: Record, keys: dict[str, str], words: str
) -> None:
    good = [{**pair, "s": [[0, 1]]} for pair in PAIRS]
    written(tmp_path, [*good, record])
    with pytest.raises(DataError) as caught:
        opened(config(tmp_path, **keys), tmp_path / "cache")
    line = str(caught.value)
    assert "\n" not in line
    assert words.format(f"{tmp_path}/0.jsonl:21") in line


def test_a_part_of_which_nothing_counts_is_refused(tmp_path: Path) -> None:
    written(tmp_path, [{"text": "z" * 400, "s": [[0, 100]]}])
    with pytest.raises(DataError, match="nothing of the held-out part counts in the loss"):
        opened(config(tmp_path, spans_key="s"), tmp_path / "cache")


def test_a_resumed_run_feeds_the_same_rows_with_the_same_masks(tmp_path: Path) -> None:
    """Also from another layout on, and with a cache of its own."""
    data = written(tmp_path, PAIRS)

    def steps(cache: str, dp: int, start: int) -> list[tuple[np.ndarray, np.ndarray, int]]:
        samples = opened(data, tmp_path / cache).train
        found: list[list[StepBatch]] = []
        for index in range(dp):
            given: dict[str, Any] = {"layout": Layout(dp=dp, micro_batch=2), "dp_index": index}
            loader = BatchLoader(Feed.uniform(samples, 3, 6), **given, start_step=start, depth=2)
            found.append([loader.next() for _ in range(start, 9)])
            loader.close()
        return [joined(parts) for parts in zip(*found, strict=True)]

    def joined(parts: tuple[StepBatch, ...]) -> tuple[np.ndarray, np.ndarray, int]:
        (tokens,) = {part.loss_tokens for part in parts}
        real = [part.weights > 0 for part in parts]
        masks = [
            part.counted[kept] for part, kept in zip(parts, real, strict=True) if part.counted is not None
        ]
        rows = [part.tokens[kept] for part, kept in zip(parts, real, strict=True)]
        return np.concatenate(rows), np.concatenate(masks), tokens

    whole = steps("cache", 1, 0)
    assert len({tokens for _, _, tokens in whole}) > 1
    for start, dp in ((4, 1), (5, 3)):
        for (rows, masks, tokens), expected in zip(steps("other", dp, start), whole[start:], strict=True):
            np.testing.assert_array_equal(rows, expected[0])
            np.testing.assert_array_equal(masks, expected[1])
            assert tokens == expected[2] == masks.sum()
