"""Tokenizers of a file: ids, ends, masks by offsets, the cache, gaps to fill in, and what is refused."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.tokenizer import FillInTheMiddle
from picotron_ray.data import tokenise
from picotron_ray.data.cache import TokenSplits, byte_splits
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.data.fill_middle import MiddleMover
from picotron_ray.data.tokenise import parts_of
from picotron_ray.data.tokenizer import Tokenizer, open_tokenizer
from picotron_ray.errors import DataError
from tests.support.data_kit import write_tokenizer

TEXTS = [f"The sum of {i} and é is {i * i} €.\nHow much is it? <end> 𝄞" for i in range(40)]


def config(tmp_path: Path, **given: Any) -> DataConfig:
    given = {"source": "text", "path": str(tmp_path / "docs"), "sequence_length": 8, **given}
    if not (tmp_path / "tok").exists():
        write_tokenizer(tmp_path / "tok")
    return DataConfig(**{"tokenizer": str(tmp_path / "tok"), "held_out_fraction": 0.2, **given})


def write_texts(folder: Path) -> None:
    folder.mkdir(parents=True)
    for number, text in enumerate(TEXTS):
        (folder / f"{number}.txt").write_text(text, "utf-8")


def build(tmp_path: Path, data: DataConfig, vocabulary: int = 300) -> DataSplits:
    return build_dataset(data, vocabulary, 0, tmp_path / "cache")


def documents(splits: TokenSplits) -> list[list[int]]:
    found = []
    assert splits.ends is not None
    for tokens, ends in zip((splits.train, splits.held_out), splits.ends, strict=True):
        found += [tokens[a:b].tolist() for a, b in pairwise([0, *ends.tolist()])]
    return found


def test_each_document_is_its_ids_and_an_end(tmp_path: Path) -> None:
    """Also where its text spells a special token out, which is text like any other."""
    write_texts(tmp_path / "docs")
    data = config(tmp_path)
    tokenizer = open_tokenizer(data)
    found = documents(byte_splits(data, tmp_path / "cache"))
    assert sorted(tokenizer.decode(ids[:-1]) for ids in found) == sorted(TEXTS)
    assert {ids[-1] for ids in found} == {tokenizer.end_id} == {0}
    assert all(0 not in ids[:-1] for ids in found)
    assert sum(map(len, found)) < sum(len(text.encode()) for text in TEXTS)


def test_tokens_do_not_depend_on_how_many_are_encoded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_texts(tmp_path / "docs")
    whole = build(tmp_path, config(tmp_path)).fingerprint
    monkeypatch.setattr(tokenise, "PART_CHARACTERS", 100)
    again = build_dataset(config(tmp_path), 300, 0, tmp_path / "other").fingerprint
    assert whole == again


def test_large_documents_are_cut_at_line_ends() -> None:
    text = "one two\nthree é\n\nfour" * 50
    for size in (1, 7, 1000):
        data = text.encode()
        pieces = (data[at : at + size] for at in range(0, len(data), size))
        found = list(parts_of(pieces, 40))
        assert "".join(part for part, _ in found) == text
        assert [last for _, last in found] == [False] * (len(found) - 1) + [True]
        assert all(len(part) <= 40 for part, _ in found)
        assert all(part.endswith("two\n") for part, last in found if not last)


def test_prompts_and_spans_count_by_offsets(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    rows = [{"q": f"How é {i}? ", "text": f"It is {i} €", "s": [[3, 5]]} for i in range(40)]
    (tmp_path / "docs" / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for key, expected, end in (("prompt_key", "It is {} €", 1), ("spans_key", "is", 0)):
        name = "q" if key == "prompt_key" else "s"
        data = config(tmp_path, source="jsonl", loss_mask=True, **{key: name})
        tokenizer, splits = open_tokenizer(data), byte_splits(data, tmp_path / "cache")
        assert splits.masks is not None
        assert splits.ends is not None
        start, seen = 0, set()
        for stop in splits.ends[0].tolist():
            ids, mask = splits.train[start:stop], splits.masks[0][start:stop]
            assert mask[-1] == end
            seen.add(tokenizer.decode(ids[:-1][mask[:-1] > 0]).strip())
            start = stop
        assert seen <= {expected.format(i) for i in range(40)}
        assert seen


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    write_texts(tmp_path / "docs")
    write_tokenizer(tmp_path / "tok", extra=70_000)
    data = config(tmp_path)
    found = byte_splits(data, tmp_path / "cache")
    assert found.train.dtype == np.dtype("<u4")
    assert int(found.train.max()) >= 70_000
    assert {open_tokenizer(data).decode(ids[:-1]) for ids in documents(found)} == set(TEXTS)


def test_the_tokenizer_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    write_texts(tmp_path / "docs")
    first = build(tmp_path, config(tmp_path)).fingerprint
    file = tmp_path / "tok" / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    assert build(tmp_path, config(tmp_path)).fingerprint != first
    assert build(tmp_path, config(tmp_path, end_token=5)).fingerprint != first


def test_documents_are_numbered_by_their_ends_not_by_an_id(tmp_path: Path) -> None:
    """As a template may put the end's token inside of a document."""
    write_texts(tmp_path / "docs")
    masked = build(tmp_path, config(tmp_path, document_masks=True)).train
    plain = build(tmp_path, config(tmp_path)).train
    samples = np.arange(masked.samples)
    assert plain.documents(samples) is None
    numbers = masked.documents(samples)
    assert numbers is not None
    rows = masked.rows(samples)[:, :-1]
    before = np.cumsum(rows == 0, 1) - (rows == 0)
    np.testing.assert_array_equal(numbers, before)
    packed = build(tmp_path, config(tmp_path, batching="packed", sequence_length=64)).train
    assert packed.samples > 0


def test_a_document_that_is_cut_ends_where_its_part_does(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("The sum. " * 100)
    found = byte_splits(config(tmp_path), tmp_path / "cache")
    assert found.ends is not None
    assert [ends.tolist() for ends in found.ends] == [[], [len(found.held_out)]]


MOVER = FillInTheMiddle(rate=0.5, spm_rate=0.5, prefix="<pre>", middle="<mid>", suffix="<suf>")


def test_gaps_are_a_function_of_seed_and_text(tmp_path: Path) -> None:
    write_texts(tmp_path / "docs")
    data = config(tmp_path, fill_in_the_middle=MOVER)
    tokenizer = open_tokenizer(data)
    words = {name: tokenizer.id_of(f"<{name}>") for name in ("pre", "mid", "suf")}
    kinds = {"plain": 0, "psm": 0, "spm": 0}
    texts = set()
    for ids in documents(byte_splits(data, tmp_path / "cache")):
        if words["mid"] not in ids:
            kinds["plain"] += 1
            texts.add(tokenizer.decode(ids[:-1]))
            continue
        suffix_at, middle_at = ids.index(words["suf"]), ids.index(words["mid"])
        assert ids[0] == words["pre"]
        prefix, suffix = ids[1:suffix_at], ids[suffix_at + 1 : middle_at]
        kinds["psm" if prefix else "spm"] += 1
        texts.add(tokenizer.decode(prefix + ids[middle_at + 1 : -1] + suffix))
    assert texts == set(TEXTS)
    assert min(kinds.values()) >= 4, kinds
    again = build(tmp_path, data).fingerprint
    assert build_dataset(data, 300, 0, tmp_path / "other").fingerprint == again
    other = data.model_copy(update={"fill_in_the_middle": MOVER.model_copy(update={"seed": 1})})
    assert build(tmp_path, other).fingerprint != again


def test_cuts_are_uniform() -> None:
    class Fake:
        def id_of(self, token: str) -> int:
            return 1

    fake: Any = Fake()
    mover = MiddleMover.of(FillInTheMiddle(rate=1, spm_rate=0), fake)
    lengths = np.array([[len(part) for part in mover.moved(f"{i:0100}").texts] for i in range(3000)])
    assert np.abs(lengths.mean(0) / 100 - 1 / 3).max() < 0.02
    share = FillInTheMiddle(rate=0.3, spm_rate=0.9)
    moved = [MiddleMover.of(share, fake).moved(f"{i:0100}").before for i in range(3000)]
    assert abs(np.mean([len(before) > 1 for before in moved]) - 0.3) < 0.03
    assert abs(np.mean([before[0] == (1, 1) for before in moved if len(before) > 1]) - 0.9) < 0.03


def refused(tmp_path: Path, data: DataConfig, vocabulary: int = 300) -> str:
    with pytest.raises(DataError) as caught:
        build(tmp_path, data, vocabulary)
    line = str(caught.value)
    assert "\n" not in line
    assert not list((tmp_path / "cache").glob("tokens-*[!k]"))
    return line


def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    write_texts(tmp_path / "docs")
    data = config(tmp_path)
    size = open_tokenizer(data).vocabulary
    small = f"model.vocab_size: {size - 1} is less than the {size} ids of data.tokenizer"
    assert small in refused(tmp_path, data, size - 1)
    absent = data.model_copy(update={"tokenizer": str(tmp_path / "none")})
    assert f"data.tokenizer: cannot read {tmp_path}/none: No such file" in refused(tmp_path, absent)
    (tmp_path / "tok" / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    assert "the eos_token '<stop>' of tokenizer_config.json is no token" in refused(tmp_path, data)
    (tmp_path / "tok" / "tokenizer_config.json").write_text("{")
    assert "tokenizer_config.json is not JSON" in refused(tmp_path, data)
    (tmp_path / "tok" / "tokenizer_config.json").unlink()
    assert refused(tmp_path, data).startswith("data.end_token: saw null, and no tokenizer_config.json")
    assert "data.end_token: saw 300, expected an id below" in refused(
        tmp_path, config(tmp_path, end_token=300), 301
    )
    gaps = config(tmp_path, end_token=1, fill_in_the_middle=FillInTheMiddle())
    assert "data.fill_in_the_middle.prefix: saw '<|fim_prefix|>', which is no token" in refused(
        tmp_path, gaps
    )
    (tmp_path / "tok" / "tokenizer.json").write_text("{}")
    assert "is no tokenizer.json that the package tokenizers reads" in refused(tmp_path, data)


def test_ids_are_shown_as_text_by_whatever_made_them(tmp_path: Path) -> None:
    assert (
        open_tokenizer(DataConfig()).decode([104, 256, 0xE2, 0x82, 0xAC, 260])
        == "h<|end of document|>€<|260|>"
    )
    numbers: Tokenizer = open_tokenizer(DataConfig(source="memmap", path="x"))
    assert numbers.decode([5, 6]) == "5 6"
    with pytest.raises(DataError, match=r"data.tokenizer: saw null with data.source=memmap"):
        numbers.encode(["x"])
    found = open_tokenizer(config(tmp_path, source="memmap"))
    assert found.decode([*found.encode(["the sum é"])[0], 0, 999]) == "the sum é<end><|999|>"
