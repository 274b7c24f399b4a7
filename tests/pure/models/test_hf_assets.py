"""Everything that a run keeps of the checkpoint that it began as, and the vocabulary of its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.config.schema.data import DataConfig
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError, CorruptError
from picotron_ray.runtime.run_storage import hf_assets
from picotron_ray.runtime.run_storage.kept_files import read_kept

WORDS = {"a": 0, "b": 1, "c": 9}
Contents = dict[str, Any]


def folder_of(path: Path, contents: Contents) -> Path:
    path.mkdir(exist_ok=True)
    for name, value in contents.items():
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        (path / name).write_bytes(data)
    return path


def read(folder: Path, vocabulary: int = 10) -> hf_assets.HfAssets:
    return hf_assets.read(folder, "there", {"vocab_size": vocabulary}, vocabulary)


@pytest.mark.parametrize(
    ("contents", "largest"),
    [
        ({"tokenizer.json": {"model": {"vocab": WORDS}, "added_tokens": [{"id": 11}]}}, 11),
        ({"tokenizer.json": {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}}}, 1),
        ({"vocab.json": WORDS, "merges.txt": b"a b"}, 9),
        ({"vocab.json": WORDS, "added_tokens.json": {"<pad>": 10}}, 10),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"12": {}}}, "vocab.json": WORDS}, 12),
        ({"tokenizer.model": b"\x80\x04not looked into"}, None),
        ({"generation_config.json": {"eos_token_id": 99}}, None),
    ],
)
def test_the_largest_id_lies_below_the_vocabulary(
    tmp_path: Path, contents: Contents, largest: int | None
) -> None:
    folder = folder_of(tmp_path, contents)
    kept = read(folder, 13)
    assert kept.largest_id == largest
    assert sorted(kept.files) == sorted(contents)
    assert kept.has_tokenizer is bool(set(contents) & set(hf_assets.VOCABULARIES))
    if largest is not None:
        assert read(folder, largest + 1).largest_id == largest
        text = f"saw token id {largest}, expected ids below {largest}, .*of another vocabulary; take"
        with pytest.raises(ConfigError, match=text) as caught:
            read(folder, largest)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("contents", "text"),
    [
        ({"tokenizer.json": b"{"}, "tokenizer.json: is not JSON"),
        ({"tokenizer.json": [1]}, "tokenizer.json: saw a list, expected an object"),
        ({"tokenizer.json": {}}, "saw no vocabulary of whole numbers"),
        ({"tokenizer.json": {"model": {"vocab": 5}}}, "saw no vocabulary of whole numbers"),
        ({"tokenizer.json": {"model": {"vocab": {"a": "0"}}}}, "'0' is no token id"),
        ({"tokenizer.json": {"model": {"vocab": WORDS}, "added_tokens": [5]}}, "saw no vocabulary"),
        ({"vocab.json": {"a": -1}}, "-1 is no token id"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": {}}}}, "saw no vocabulary"),
        ({"generation_config.json": b"nothing"}, "generation_config.json: is not JSON"),
    ],
)
def test_a_broken_file_is_one_line(tmp_path: Path, contents: Contents, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        read(folder_of(tmp_path, contents))
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_too_large_or_unreadable_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path, {"vocab.json": WORDS})
    (folder / "merges.txt").mkdir()
    with pytest.raises(ConfigError, match=r"merges.txt: cannot be read: "):
        read(folder)
    monkeypatch.setattr(hf_assets, "MOST_BYTES", 5)
    with pytest.raises(ConfigError, match=r"vocab.json: saw \d+ bytes, expected at most 5 of such a file"):
        read(folder)


def test_it_is_stored_taken_over_and_written_back(tmp_path: Path) -> None:
    kept = read(folder_of(tmp_path / "hf", {"vocab.json": WORDS, "merges.txt": b"a b", "notes.txt": b"x"}))
    first, second = (LocalStorage(str(tmp_path / "runs"), name) for name in ("first", "second"))
    assert hf_assets.load(first) is None
    hf_assets.copy_assets(first, second)
    assert hf_assets.load(second) is None
    hf_assets.store(first, kept)
    for _ in range(2):
        hf_assets.copy_assets(first, second)
    for item in list(first.list("")):
        first.delete(item.key)
    assert hf_assets.load(second) == kept
    out = tmp_path / "out"
    out.mkdir()
    hf_assets.write(out, kept)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == kept.files
    second.put("imported/merges.txt", b"b a")
    with pytest.raises(CorruptError, match="does not match its digest"):
        hf_assets.load(second)
    second.delete("imported/merges.txt")
    with pytest.raises(CorruptError, match="is missing"):
        hf_assets.load(second)


def test_bytes_are_not_fed_to_weights_with_a_tokenizer_of_their_own(tmp_path: Path) -> None:
    bare = read(folder_of(tmp_path, {}))
    known = read(folder_of(tmp_path, {"vocab.json": WORDS}))
    for source in ("stdlib", "text", "jsonl"):
        job = JobConfig(data=DataConfig(source=source, path=None if source == "stdlib" else "x"))
        assert hf_assets.source_note(job, None) is None
        with pytest.raises(ConfigError, match=f"^data.source: saw {source}, .* up to 9; .*=memmap$"):
            hf_assets.source_note(job, known)
        assert "had no tokenizer" in str(hf_assets.source_note(job, bare))
    assert hf_assets.source_note(JobConfig(data=DataConfig(source="memmap", path="x")), known) is None


def test_a_file_is_read_up_to_a_gibibyte() -> None:
    asked: list[tuple[str, int, int]] = []

    class Storage:
        where = "here"

        def get_range(self, key: str, start: int, length: int) -> bytes:
            asked.append((key, start, length))
            return b"data"

    digest, key = hf_assets.blake3(b"data").hexdigest(), f"{hf_assets.PREFIX}vocab.json"
    found = read_kept(Storage(), key, digest, hf_assets.RECORD, hf_assets.FILE_BYTES)  # type: ignore[arg-type]
    assert found == b"data"
    assert asked == [("imported/vocab.json", 0, 1_073_741_825)]
