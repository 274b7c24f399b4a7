"""Files of a source: which ones are found, how they are read in pieces and shown in messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from picotron_ray.config.schema.data import DataConfig
from picotron_ray.data import sources
from picotron_ray.data.listing import find_files
from picotron_ray.data.source_files import SourceFile, shown, unreadable
from picotron_ray.errors import DataError


def found(path: str) -> list[str]:
    return [file.name for file in find_files(DataConfig(source="text", path=path))]


def test_regular_files_at_every_depth_but_no_hidden_ones(tmp_path: Path) -> None:
    for name in ("b.txt", ".hidden", "one/a.txt", "one/two/c.txt", ".git/config", "one/.d/e.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    assert found(str(tmp_path)) == ["b.txt", "one/a.txt", "one/two/c.txt"]
    assert found(f"{tmp_path}/**/*.txt") == ["b.txt", "one/a.txt", "one/two/c.txt"]
    assert found(f"{tmp_path}/*") == ["b.txt"]
    assert found(f"{tmp_path}/o?e/*.txt") == ["one/a.txt"]
    assert found(f"{tmp_path}/one/[a-z].*") == ["a.txt"]
    assert found(str(tmp_path / "one" / "a.txt")) == ["a.txt"]


def test_a_path_is_shown_on_one_line() -> None:
    assert shown("naïve\n\x1b.txt") == r"naïve\n\x1b.txt"
    assert shown(os.fsdecode(b"caf\xe9")) == r"caf\xe9"


def test_the_systems_reason_is_named() -> None:
    hint = "give a file, folder or glob that this user can read"
    for error, why in (
        (OSError(13, "Permission denied", "x"), "Permission denied"),
        (OSError("odd disk"), "odd disk"),
        (ValueError("embedded null byte"), "embedded null byte"),
    ):
        assert str(unreadable("x", error)) == f"data.path: cannot read x: {why}; {hint}"


def test_a_file_is_read_in_pieces_of_16_mib(tmp_path: Path) -> None:
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 2**24 + 1)
    pieces = sources._pieces(SourceFile(tmp_path / "large", "large"), check=False)
    assert [len(piece) for piece in pieces] == [2**24, 1]


@pytest.mark.parametrize(
    ("text", "near"), [(b"\xff", 0), (b"abcdef\xff", 6), (b"abc\xe4", 4), (b"abcd\xe4x", 4)]
)
def test_a_byte_that_is_not_utf8_is_located(
    text: bytes, near: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 3)
    file = tmp_path / "odd.txt"
    file.write_bytes(text)
    with pytest.raises(DataError) as caught:
        list(sources._pieces(SourceFile(file, "odd.txt"), check=True))
    hint = "re-encode it, or choose the text files by a glob"
    assert str(caught.value) == f"data.path: {file} is not UTF-8 (near byte {near}); {hint}"
