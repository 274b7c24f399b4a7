"""The token cache: its format, its borders, and what it leaves behind when it cannot be built."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data import bigram_baseline, cache, split_writer
from picotron_ray.data.bigram_baseline import bigram_entropy
from picotron_ray.data.cache import TextSource, byte_splits
from picotron_ray.data.dataset import build_dataset
from picotron_ray.data.split_writer import CacheForm, held_out
from picotron_ray.errors import DataError

NAMES = {"a.txt": False, "b.txt": True}
"""File → whether the half that is held out has it."""


def config(path: Path, fraction: float = 0.5) -> DataConfig:
    return DataConfig(source="text", path=str(path), sequence_length=3, held_out_fraction=fraction)


def written(folder: Path, text: bytes = b"some text", name: str = "a.txt") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(text)
    return folder / name


def places(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def test_version_stands_for_what_is_stored(tmp_path: Path) -> None:
    """Whoever changes what a cache holds, or how, gives it a new VERSION."""
    assert cache.cache_key(TextSource.of(DataConfig()), []) == "8c52b6b2ae2ba6fd5cc722981abdeb2c"
    splits = byte_splits(config(written(tmp_path / "docs", b"abbab")), tmp_path / "deep" / "cache")
    (place,) = (tmp_path / "deep" / "cache").glob("tokens-*[!k]")
    assert (place / "train.u16").read_bytes() == b"a\0b\0b\0"
    assert (place / "held_out.u16").read_bytes() == b"a\0b\0\0\1"
    assert json.loads((place / "meta.json").read_text()) == {
        "version": 1,
        "tokens": {"train": 3, "held_out": 3},
        "digest": splits.digest,
        "bigram_entropy": 0.0,
    }


def test_recorded_fingerprint(tmp_path: Path) -> None:
    """Whoever feeds other samples, or in another order, has another fingerprint."""
    data = config(written(tmp_path / "docs", b"some words"))
    found = build_dataset(data, 257, 7, tmp_path / "cache")
    assert found.fingerprint == "b552dd5162a092136adcb1de585736ea"
    assert build_dataset(data, 257, 8, tmp_path / "cache").fingerprint != found.fingerprint


def test_that_share_of_all_hashes_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = {b"0": 0, b"less": 2**62 - 1, b"border": 2**62, b"half": 2**63, b"last": 2**64 - 1}
    monkeypatch.setattr(split_writer.xxhash, "xxh3_64_intdigest", hashes.__getitem__)
    assert [key for key in hashes if held_out(key, 0.25)] == [b"0", b"less"]


@pytest.mark.parametrize("name", NAMES)
def test_one_document_is_cut_whichever_side_it_would_be_on(name: str, tmp_path: Path) -> None:
    assert held_out(name.encode(), 0.5) == NAMES[name]
    splits = byte_splits(config(written(tmp_path / "docs", b"abcdefg", name)), tmp_path / "cache")
    assert splits.train.tolist() == [*b"abcd"]
    assert splits.held_out.tolist() == [*b"efg", 256]


def test_a_share_of_no_token_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^data.path: the held-out part has 0 tokens, but one sample needs 4;"
    ):
        build_dataset(config(written(tmp_path / "docs"), 0.01), 257, 0, tmp_path / "cache")


def test_a_document_without_a_byte_has_no_end(tmp_path: Path) -> None:
    for name in ("a.txt", "c.txt"):
        written(tmp_path / "docs", b"", name)
    written(tmp_path / "docs", b"b", "b.txt")
    written(tmp_path / "docs", b"d", "d.txt")
    splits = byte_splits(config(tmp_path / "docs"), tmp_path / "cache")
    assert (splits.train.tolist(), splits.held_out.tolist()) == ([*b"d", 256], [*b"b", 256])


@pytest.mark.parametrize(("spare_bytes", "noticed"), [(-1, False), (0, True)])
def test_content_is_checked_up_to_a_size(
    spare_bytes: int, noticed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = config(written(tmp_path / "docs", b"abcdefghi"), 0.2)
    wanted = byte_splits(data, tmp_path / "cache")
    assert (wanted.train.nbytes, wanted.held_out.nbytes) == (16, 4)
    (file,) = (tmp_path / "cache").glob("*/train.u16")
    file.write_bytes(b"x" + file.read_bytes()[1:])
    monkeypatch.setattr(cache, "CHECKED_BYTES", 20 + spare_bytes)
    assert bytes(byte_splits(data, tmp_path / "cache").train.astype(np.uint8)[:2]) == (
        b"ab" if noticed else b"xb"
    )


def test_a_cache_of_more_than_256_mib_is_opened_unread(tmp_path: Path) -> None:
    tokens = {"train": 2**27, "held_out": 1}
    for name, count in tokens.items():
        (tmp_path / f"{name}.u16").touch()
        os.truncate(tmp_path / f"{name}.u16", 2 * count)
    (tmp_path / "meta.json").write_text(json.dumps({"tokens": tokens, "digest": "?", "bigram_entropy": 1}))
    splits = cache._open(tmp_path, CacheForm(257, masked=False, ended=False, end=256))
    assert splits is not None
    assert (len(splits.train), len(splits.held_out)) == (2**27, 1)


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError(28, "No space left on device"), "No space left on device"), (OSError("odd disk"), "odd disk")],
)
def test_a_build_that_fails_says_why_and_leaves_its_lock_alone(
    error: OSError, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(data: Any, files: Any, folder: Path) -> None:
        shutil.rmtree(folder)  # by somebody else; that it cannot be removed again hides no reason
        raise error

    data, folder = config(written(tmp_path / "docs")), tmp_path / "cache"
    for write in (gone, lambda *_: (_ for _ in ()).throw(error)):
        monkeypatch.setattr(cache, "_write", write)
        with pytest.raises(DataError) as caught:
            byte_splits(data, folder)
        place = next(folder.iterdir()).with_suffix("")
        assert str(caught.value) == (
            f"token cache: cannot write {place}: {why}; free space or allow writing there"
        )
        assert places(folder) == [".lock"]


@pytest.mark.parametrize("source", ["text", "stdlib"])
def test_a_source_without_text_is_named(source: str, tmp_path: Path) -> None:
    data = DataConfig(source=source, path=str(tmp_path))  # type: ignore[arg-type]
    where = {"text": str(tmp_path), "stdlib": "the standard library"}[source]
    with pytest.raises(DataError) as caught:
        cache._write(TextSource.of(data), [], tmp_path)
    assert str(caught.value) == f"data.path: {where} holds no text; every file of it is empty"


# --- the baseline --------------------------------------------------------------------------------------


def test_the_baseline_is_of_the_first_eight_million_tokens() -> None:
    class Tokens:
        def __getitem__(self, part: slice) -> np.ndarray:
            assert part == slice(8_000_000)
            return np.array([0, 1, 0, 0])

    tokens: Any = Tokens()
    assert bigram_entropy(tokens) == pytest.approx(2 / 3 * np.log(2))


@pytest.mark.parametrize("largest", [1, 5, 9])
def test_values_are_counted_by_a_table_as_by_sorting(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bigram_baseline, "DENSE", 5)
    assert bigram_baseline._counts(np.array([0, largest, largest])).tolist() == [1, 2]
