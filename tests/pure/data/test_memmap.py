"""Files of token ids: what a scan finds in them, and remembers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data import memmap
from picotron_ray.data.memmap import memmap_splits
from picotron_ray.errors import DataError

FILES = [([0, 0, 0], 0), ([5, 0, 3], 5), ([0, 1], 1), ([1, 2, 3, 9, 4], 9)]


@pytest.mark.parametrize(("ids", "largest"), FILES)
def test_a_scan_finds_the_largest_id_in_every_part(
    ids: list[int], largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memmap, "SCAN_TOKENS", 2)
    path = tmp_path / "tokens.bin"
    np.array(ids, np.uint16).tofile(path)
    tokens = np.fromfile(path, np.uint16)
    found = memmap._scan(path, tokens, tmp_path)
    assert found[0] == largest
    assert memmap._scan(path, tokens[:0], tmp_path) == found, "remembered, and not read again"


def test_a_scan_takes_16_million_tokens_at_a_time(tmp_path: Path) -> None:
    """So its memory is bounded, whatever the file's size is."""
    taken: list[slice] = []

    class Tokens:
        dtype = np.dtype(np.uint16)

        def __len__(self) -> int:
            return 2**24 + 1

        def __getitem__(self, part: slice) -> np.ndarray:
            taken.append(part)
            return np.zeros(1, np.uint16)

    tokens: Any = Tokens()
    memmap._scan(tmp_path, tokens, tmp_path)
    assert taken == [slice(0, 2**24), slice(2**24, 2**25)]


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_the_end_of_a_document_is_found_anywhere(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memmap, "SCAN_TOKENS", 2)
    tokens = np.zeros(5, np.uint16)
    tokens[at] = 7
    memmap._check_end(tokens, 7, Path("x"))
    with pytest.raises(DataError, match=r"^data.end_token: saw 8, which x never holds"):
        memmap._check_end(tokens, 8, Path("x"))


def single(tmp_path: Path, fraction: float = 0.5, cache: str = "deep/cache") -> str:
    path = tmp_path / "all.bin"
    if not path.exists():
        np.arange(8, dtype=np.uint16).tofile(path)
    data = DataConfig(source="memmap", path=str(path), held_out_fraction=fraction)
    return memmap_splits(data, 8, tmp_path / cache).digest


def test_of_a_single_file_the_cut_is_part_of_the_digest(tmp_path: Path) -> None:
    assert single(tmp_path, 0.25) != single(tmp_path, 0.5)
    assert single(tmp_path, 0.5) == single(tmp_path, 0.5, "another")
    assert len(list((tmp_path / "deep" / "cache").iterdir())) == 1, "one memo, in a folder that is made"


def test_a_memo_that_cannot_be_put_in_place_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = single(tmp_path)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert single(tmp_path, cache="another") == wanted
    assert list((tmp_path / "another").iterdir()) == []


@pytest.mark.parametrize(("names", "seen"), [("", "nothing"), ("gfedcba", "a, b, c, d, e, f")])
def test_a_folder_without_both_parts_is_described_by_a_few_names(
    names: str, seen: str, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(DataError) as caught:
        memmap_splits(DataConfig(source="memmap", path=str(tmp_path)), 8, tmp_path)
    assert str(caught.value) == (
        f"data.path: {tmp_path} holds {seen}; expected train.bin and held_out.bin (or val.bin), or one file"
    )


def test_a_pipe_in_place_of_a_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.bin").touch()
    os.mkfifo(tmp_path / "val.bin")
    os.truncate(tmp_path / "train.bin", 8)
    with pytest.raises(DataError, match="neither a regular file nor a folder"):
        memmap_splits(DataConfig(source="memmap", path=str(tmp_path)), 8, tmp_path)
