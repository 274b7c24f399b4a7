"""Sources, the token cache and the held-out split; what is refused, and in which words."""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data import cache as token_cache
from picotron_ray.data import memmap, sources
from picotron_ray.data.bigram_baseline import bigram_entropy
from picotron_ray.data.dataset import DataSplits, build_dataset
from picotron_ray.errors import DataError


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """A folder with fifty small documents."""
    folder = tmp_path / "docs"
    for i in range(50):
        file = folder / f"part{i % 3}" / f"doc{i:02}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"Document {i}: grüße, 世界. " * (20 + i), "utf-8")
    return folder


def build(tmp_path: Path, vocabulary: int = 264, **settings: Any) -> DataSplits:
    data = DataConfig(**{"source": "text", "sequence_length": 16, "held_out_fraction": 0.2, **settings})
    return build_dataset(data, vocabulary, 0, tmp_path / "cache")


def refused(tmp_path: Path, **settings: Any) -> str:
    """The one line with which the settings are refused; no cache may be left behind."""
    with pytest.raises(DataError) as caught:
        build(tmp_path, **settings)
    line = str(caught.value)
    assert "\n" not in line
    assert list((tmp_path / "cache").glob("tokens-*[!k]")) == []
    return line


def documents(tokens: np.ndarray) -> set[bytes]:
    """The documents of a stream, checked to end with the end-of-document token."""
    assert tokens[-1] == 256
    ends = np.nonzero(tokens == 256)[0]
    starts = [0, *(ends[:-1] + 1)]
    return {tokens[a:b].astype(np.uint8).tobytes() for a, b in zip(starts, ends, strict=True)}


def test_text_goes_in_whole_and_is_split_by_name(tmp_path: Path, box: Path) -> None:
    splits = build(tmp_path, path=str(box))
    train, held = documents(splits.train.tokens), documents(splits.held_out.tokens)
    assert train | held == {file.read_bytes() for file in box.rglob("*.txt")}
    assert not train & held
    assert 3 <= len(held) <= 20  # 10 of 50 on average
    # the name decides, not the place, the order of files or what else lies there
    shutil.copytree(box, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "more.txt").write_text("one more " * 40)
    again = build(tmp_path, path=str(tmp_path / "elsewhere"))
    assert documents(again.held_out.tokens) - held <= {b"one more " * 40}


def test_fingerprint_is_of_content_not_of_place(tmp_path: Path, box: Path) -> None:
    first = build(tmp_path, path=str(box))
    shutil.copytree(box, tmp_path / "copy")
    assert build(tmp_path, path=str(tmp_path / "copy")).fingerprint == first.fingerprint
    assert build(tmp_path, path=str(box), sequence_length=8).fingerprint != first.fingerprint
    one = tmp_path / "copy" / "part0" / "doc00.txt"
    one.write_text(one.read_text().replace("Document", "Dokument"))
    assert build(tmp_path, path=str(tmp_path / "copy")).fingerprint != first.fingerprint


def test_glob_names_files_as_the_folder_does(tmp_path: Path, box: Path) -> None:
    (box / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    by_glob = build(tmp_path, path=f"{box}/**/*.txt")
    (box / "picture.png").unlink()
    assert by_glob.fingerprint == build(tmp_path, path=str(box)).fingerprint
    only = build(tmp_path, path=f"{box}/part1/doc*.txt")
    assert len(documents(only.train.tokens) | documents(only.held_out.tokens)) == 17


def test_one_file_is_split_by_position(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("It was a dark and stormy night. " * 100)
    splits = build(tmp_path, path=str(file), held_out_fraction=0.25)
    both = np.concatenate([splits.train.tokens, splits.held_out.tokens])
    assert both[:-1].astype(np.uint8).tobytes() == file.read_bytes()
    assert len(splits.held_out.tokens) == round(len(both) * 0.25)


def test_stdlib_is_the_default_and_is_split_by_file(tmp_path: Path) -> None:
    splits = build_dataset(DataConfig(), 264, 0, tmp_path / "cache")
    assert len(splits.train.tokens) > 3_000_000
    share = len(splits.held_out.tokens) / (len(splits.train.tokens) + len(splits.held_out.tokens))
    assert 0.01 < share < 0.2
    assert 1.8 < splits.bigram_entropy < 2.6
    source = Path(json.__file__).read_bytes()
    assert any(
        source in part.tokens[:].astype(np.uint8).tobytes() for part in (splits.train, splits.held_out)
    )


def test_jsonl_takes_the_named_key_and_keeps_twins_together(tmp_path: Path) -> None:
    texts = [f"sample text number {i % 30} " * 5 for i in range(60)]
    file = tmp_path / "data.jsonl"
    file.write_text("\n\n".join(json.dumps({"body": text, "id": 1}) for text in texts) + "\n")
    splits = build(tmp_path, source="jsonl", path=str(file), text_key="body", held_out_fraction=0.3)
    train, held = documents(splits.train.tokens), documents(splits.held_out.tokens)
    assert train | held == {text.encode() for text in texts}
    assert not train & held
    assert (splits.train.tokens == 256).sum() + (splits.held_out.tokens == 256).sum() == 60


def test_empty_documents_leave_no_trace(tmp_path: Path, box: Path) -> None:
    wanted = build(tmp_path, path=str(box)).fingerprint
    (box / "part0" / "empty.txt").touch()
    assert build(tmp_path, path=str(box)).fingerprint == wanted


# --- the cache -----------------------------------------------------------------------------------------


def test_cache_is_built_once_and_again_after_a_change(
    tmp_path: Path, box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []
    real = token_cache._write

    def counted(data: DataConfig, files: Any, place: Path) -> None:
        built.append(place)
        real(data, files, place)

    monkeypatch.setattr(token_cache, "_write", counted)
    first = build(tmp_path, path=str(box))
    assert build(tmp_path, path=str(box)).fingerprint == first.fingerprint
    assert len(built) == 1
    (box / "part0" / "doc00.txt").write_text("changed " * 50)
    assert build(tmp_path, path=str(box)).fingerprint != first.fingerprint
    assert len(built) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "no-meta", "bad-meta", "odd-meta", "leftover"])
def test_damaged_cache_is_built_again(tmp_path: Path, box: Path, damage: str) -> None:
    first = build(tmp_path, path=str(box))
    wanted, contents = first.fingerprint, first.train.tokens.tobytes()
    (place,) = (tmp_path / "cache").glob("tokens-*[!k]")
    tokens, meta = place / "train.u16", place / "meta.json"
    if damage == "flip":
        raw = bytearray(tokens.read_bytes())
        raw[100] ^= 1
        tokens.write_bytes(raw)
    elif damage == "cut":
        os.truncate(tokens, 100)
    elif damage == "no-meta":
        meta.unlink()
    elif damage == "bad-meta":
        meta.write_text('{"tokens": {"tr')
    elif damage == "odd-meta":
        meta.write_text("[]")
    else:
        place.rename(place.with_suffix(".new"))
    again = build(tmp_path, path=str(box))
    assert (again.fingerprint, again.train.tokens.tobytes()) == (wanted, contents)
    assert [p.name for p in (tmp_path / "cache").glob("*.new")] == []


def test_workers_of_a_node_may_build_at_once(
    tmp_path: Path, box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is per open file, so threads stand in for processes; one builds, the others wait and open."""
    built: list[Path] = []
    real = token_cache._write

    def slow(data: DataConfig, files: Any, place: Path) -> None:
        built.append(place)
        time.sleep(0.05)
        real(data, files, place)

    monkeypatch.setattr(token_cache, "_write", slow)
    with ThreadPoolExecutor(4) as pool:
        seen = list(pool.map(lambda _: build(tmp_path, path=str(box)).fingerprint, range(4)))
    assert len(set(seen)) == 1
    assert len(built) == 1


# --- what is refused -----------------------------------------------------------------------------------


def test_missing_or_empty_paths(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path, path=str(tmp_path / "nowhere"))
    assert "missing" in refused(tmp_path, path=None)
    (tmp_path / "empty").mkdir()
    assert "no files" in refused(tmp_path, path=str(tmp_path / "empty"))
    assert "no files" in refused(tmp_path, path=str(tmp_path / "empty" / "*.txt"))
    (tmp_path / "empty" / "nothing.txt").touch()
    assert "holds no text" in refused(tmp_path, path=str(tmp_path / "empty"))
    os.mkfifo(tmp_path / "pipe")
    assert "neither a regular file nor a folder" in refused(tmp_path, path=str(tmp_path / "pipe"))


@pytest.mark.parametrize("source", ["text", "jsonl", "memmap"])
@pytest.mark.parametrize("path", ["a\0b", "a\0*", "x" * 5000, "a\nb", "", "~nobody/x", "/dev/null"])
def test_odd_paths(tmp_path: Path, source: str, path: str) -> None:
    line = refused(tmp_path, source=source, path=path)
    assert line.startswith("data.path: ")
    line.encode()


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"two\nlines.txt"])
def test_odd_file_names_are_read_and_can_be_shown(tmp_path: Path, name: bytes) -> None:
    file = Path(os.fsdecode(os.fsencode(tmp_path / "docs") + b"/" + name))
    file.parent.mkdir()
    file.write_bytes(b"some text " * 30)
    assert build(tmp_path, path=str(tmp_path / "docs")).train.samples > 0
    shutil.rmtree(tmp_path / "cache")
    file.write_bytes(b"\xff")
    for source in ("text", "jsonl"):
        refused(tmp_path, source=source, path=str(tmp_path / "docs")).encode()


@pytest.mark.parametrize("source", ["text", "jsonl", "memmap"])
def test_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """The tests may run as root, whom no mode stops: the system's answer is played."""
    file = tmp_path / "secret.txt"
    file.write_bytes(b"secret text")

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: deny() if self == file else real(self, *a, **k))
    monkeypatch.setattr(np, "memmap", deny)
    line = refused(tmp_path, source=source, path=str(file), memmap_dtype="uint8")
    assert "Permission denied" in line
    assert str(file) in line


def test_folder_that_the_system_refuses(tmp_path: Path, box: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("part1"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert "Permission denied" in refused(tmp_path, path=str(box))


@pytest.mark.parametrize(
    "text", [b"good \xff bad", b"cut short \xe4\xb8", b"\xff\xfeU\x00T\x00F\x001\x006\x00"]
)
def test_text_that_is_not_utf8(tmp_path: Path, text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(text)
    for size in (1 << 20, 3):  # whole, and with characters cut between pieces
        monkeypatch.setattr(sources, "PIECE_BYTES", size)
        line = refused(tmp_path, path=str(file))
        assert "latin.txt is not UTF-8" in line


def test_characters_cut_between_pieces_are_fine(
    tmp_path: Path, box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = build(tmp_path, path=str(box)).fingerprint
    monkeypatch.setattr(sources, "PIECE_BYTES", 7)
    shutil.rmtree(tmp_path / "cache")
    assert build(tmp_path, path=str(box)).fingerprint == wanted


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "cut', ":2 is not JSON"),
        (b"[1, 2]", "seen: list"),
        (b'{"body": "x"}', "no string under 'text' (seen: keys body)"),
        (b'{"text": 5}', "no string under 'text'"),
        (b'{"text": "\xff"}', "is not UTF-8"),
        (b"[" * 100_000, ":2 is not JSON"),
        (b"\x00\x01garbage", ":2 is not JSON"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: bytes, words: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    assert words in refused(tmp_path, source="jsonl", path=str(file))


def test_half_a_surrogate_pair_does_not_stop_the_run(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "emoji cut in half \\ud83d here and some more text"}\n')
    assert build(tmp_path, source="jsonl", path=str(file), sequence_length=4).train.samples > 0


def test_too_short_for_one_sample(tmp_path: Path) -> None:
    file = tmp_path / "short.txt"
    file.write_text("twenty-six letters of text")
    with pytest.raises(DataError, match=r"held-out part has 5 tokens, but one sample needs 17"):
        build(tmp_path, path=str(file))


def test_vocabulary_smaller_than_the_tokenizer(tmp_path: Path, box: Path) -> None:
    with pytest.raises(DataError, match=r"model\.vocab_size: 256 is less than the 257 ids"):
        build(tmp_path, 256, path=str(box))
    build(tmp_path, 257, path=str(box))


def test_cache_folder_that_cannot_be_written(
    tmp_path: Path, box: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(DataError, match="token cache: cannot write"):
        build(tmp_path, path=str(box))
    (tmp_path / "cache").unlink()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_cache, "write_splits", full)
    assert "No space left" in refused(tmp_path, path=str(box))


# --- memmap --------------------------------------------------------------------------------------------


def ids(path: Path, values: np.ndarray, dtype: str = "<u2") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values.astype(dtype).tofile(path)
    return path


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize("held", ["held_out.bin", "val.bin"])
def test_memmap_folder(tmp_path: Path, dtype: str, held: str) -> None:
    values = np.random.default_rng(0).integers(0, 200, 3000)
    ids(tmp_path / "bins" / "train.bin", values[:2000], dtype)
    ids(tmp_path / "bins" / held, values[2000:], dtype)
    splits = build(tmp_path, 200, source="memmap", path=str(tmp_path / "bins"), memmap_dtype=dtype)
    assert np.array_equal(splits.train.tokens, values[:2000])
    assert np.array_equal(splits.held_out.tokens, values[2000:])
    assert splits.bigram_entropy == pytest.approx(bigram_entropy(values[2000:].astype(np.uint32)))


def test_one_sample_per_part_is_enough_and_one_token_less_is_not(tmp_path: Path) -> None:
    ids(tmp_path / "bins" / "train.bin", np.arange(17))
    ids(tmp_path / "bins" / "val.bin", np.arange(16))
    assert "held-out part has 16 tokens" in refused(tmp_path, source="memmap", path=str(tmp_path / "bins"))
    ids(tmp_path / "bins" / "val.bin", np.arange(17))
    splits = build(tmp_path, source="memmap", path=str(tmp_path / "bins"))
    assert (splits.train.samples, splits.held_out.samples) == (1, 1)


def test_memmap_single_file_and_changed_content(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 50_000, 3000)
    file = ids(tmp_path / "all.bin", values)
    first = build(tmp_path, 50_000, source="memmap", path=str(file))
    assert len(first.held_out.tokens) == 600
    assert np.array_equal(np.concatenate([first.train.tokens, first.held_out.tokens]), values)
    assert build(tmp_path, 50_000, source="memmap", path=str(file)).fingerprint == first.fingerprint
    values[5] ^= 1
    ids(file, values)
    assert build(tmp_path, 50_000, source="memmap", path=str(file)).fingerprint != first.fingerprint


def test_memmap_beyond_the_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memmap, "SCAN_TOKENS", 100)
    values = np.zeros(1000, np.int64)
    values[-1] = 777
    file = ids(tmp_path / "all.bin", values)
    line = refused(tmp_path, vocabulary=777, source="memmap", path=str(file))
    assert "token id 777, beyond model.vocab_size 777" in line
    assert "at least 778" in line
    line = refused(tmp_path, vocabulary=777, source="memmap", path=str(file))  # remembered, still refused
    assert "token id 777" in line
    build(tmp_path, 778, source="memmap", path=str(file))


def test_an_end_token_that_is_nowhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memmap, "SCAN_TOKENS", 100)
    values = np.arange(1000) % 50
    values[500] = 99  # among the tokens to train on
    values[-1] = 98  # held out
    file = str(ids(tmp_path / "all.bin", values))
    build(tmp_path, source="memmap", path=file, document_masks=True, end_token=99)
    line = refused(tmp_path, source="memmap", path=file, document_masks=True, end_token=98)
    assert line.startswith("data.end_token: saw 98, which")
    assert "never holds among the tokens to train on" in line
    build(tmp_path, source="memmap", path=file, end_token=98)  # no masks, nothing to ask


def test_memmap_odd_files(tmp_path: Path) -> None:
    file = tmp_path / "odd.bin"
    file.write_bytes(b"123")
    assert "3 bytes, not a multiple of 2" in refused(tmp_path, source="memmap", path=str(file))
    file.write_bytes(b"")
    assert "is empty" in refused(tmp_path, source="memmap", path=str(file))
    (tmp_path / "bins").mkdir()
    assert "holds nothing; expected train.bin" in refused(
        tmp_path, source="memmap", path=str(tmp_path / "bins")
    )
    ids(tmp_path / "bins" / "train.bin", np.zeros(99))
    assert "holds train.bin; expected" in refused(tmp_path, source="memmap", path=str(tmp_path / "bins"))
    assert "No such file" in refused(tmp_path, source="memmap", path=str(tmp_path / "none.bin"))


def test_memmap_scan_memo_is_optional(tmp_path: Path) -> None:
    file = ids(tmp_path / "all.bin", np.arange(500))
    wanted = build(tmp_path, 500, source="memmap", path=str(file)).fingerprint
    (memo,) = (tmp_path / "cache").glob("scan-*.json")
    memo.write_text('{"larg')
    assert build(tmp_path, 500, source="memmap", path=str(file)).fingerprint == wanted
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file is in the way")
    assert build(tmp_path, 500, source="memmap", path=str(file)).fingerprint == wanted


# --- the baseline --------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [3, 250, 60_000])
def test_bigram_entropy_is_the_loss_of_the_best_table(largest: int) -> None:
    tokens = np.random.default_rng(largest).integers(0, largest, 4000)
    tokens[::2] = 1
    pairs: dict[int, dict[int, int]] = {}
    for a, b in zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True):
        pairs.setdefault(a, {})[b] = pairs.setdefault(a, {}).get(b, 0) + 1
    loss = 0.0
    for a, b in zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True):
        loss -= np.log(pairs[a][b] / sum(pairs[a].values())) / (len(tokens) - 1)
    assert bigram_entropy(tokens.astype(np.uint16)) == pytest.approx(loss, rel=1e-9)


def test_bigram_entropy_of_little() -> None:
    assert bigram_entropy(np.array([5], np.uint16)) == 0.0
    assert bigram_entropy(np.array([0, 1] * 50, np.uint16)) == pytest.approx(0.0, abs=1e-12)


def test_memmap_masks(tmp_path: Path) -> None:
    """A byte per token beside each file; what it says is part of the data's identity."""
    file, mask = tmp_path / "t.bin", tmp_path / "t.mask"
    np.arange(400, dtype="<u2").tofile(file)
    given: dict[str, Any] = {"source": "memmap", "path": str(file)}
    plain = build(tmp_path, 500, **given)
    assert plain.train.mask is None
    given["loss_mask"] = True
    assert "t.mask is missing; expected it beside" in refused(tmp_path, vocabulary=500, **given)
    for values, words in (
        (np.ones(399, "u1"), "has 399 bytes, expected 400, one per token of"),
        (np.full(400, 2, "u1"), "holds the byte 2, expected 1 for tokens that count"),
        (np.zeros(400, "u1"), "holds nothing but zeros, expected 1"),
    ):
        values.tofile(mask)
        assert words in refused(tmp_path, vocabulary=500, **given)
    seen = set()
    for low in (3, 5):
        values = (np.arange(400) % 10 > low).astype("u1")
        values.tofile(mask)
        splits = build(tmp_path, 500, **given)
        seen.add(splits.fingerprint)
        both = [splits.train.mask, splits.held_out.mask]
        np.testing.assert_array_equal(np.concatenate([part for part in both if part is not None]), values)
    assert len(seen | {plain.fingerprint}) == 3
