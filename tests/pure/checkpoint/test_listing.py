"""Listings and sizes where a look at everything takes minutes: in parts, and only what is asked for."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage import local
from picotron_ray.checkpoint.storage.base import StoredObject
from picotron_ray.checkpoint.storage.deadline import LISTED_AT_ONCE, DeadlineStorage
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.chunk_sizes import FEW, ChunkSizes
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.errors import StorageError, StorageUnavailableError


@pytest.fixture
def storage(memory_path: Path) -> LocalStorage:
    return LocalStorage(str(memory_path), "r1")


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch, memory_path: Path) -> list[str]:
    """Files of which the size was asked for."""
    found: list[str] = []
    stat = os.stat

    def noting(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        if str(path).startswith(str(memory_path)):
            found.append(str(path))
        return stat(path, *arguments, **named)

    monkeypatch.setattr(local.os, "stat", noting)
    return found


def keys(storage: LocalStorage, prefix: str) -> list[str]:
    return [entry.key for entry in storage.list(prefix)]


def test_objects_of_nested_folders_come_in_the_order_of_their_keys(storage: LocalStorage) -> None:
    names = ["a", "a-b/x", "a/x", "a/x-y/z", "a/x/z", "a0", "b/c/d/e", "b/c/d2", "b.c", "B/x", "b/c.d"]
    for name in set(names) - {"a", "a/x"}:
        storage.put(name, b"1")
    expected = sorted(set(names) - {"a", "a/x"})
    assert keys(storage, "") == expected
    for prefix in ("a", "a/", "a/x", "a/x-", "b/c", "b/c/", "b/c/d", "nothing", "nothing/here"):
        assert keys(storage, prefix) == [name for name in expected if name.startswith(prefix)], prefix


def test_a_listing_looks_no_further_than_what_is_taken_of_it(
    storage: LocalStorage, looked: list[str]
) -> None:
    for number in range(300):
        storage.put(f"chunks/{number % 10:02x}/{number:03d}", b"1")
    looked.clear()
    listing = storage.list("chunks/")
    assert [entry.key for entry in islice(listing, 40)][-1] == "chunks/01/091"
    assert len(looked) == 40
    assert len(list(listing)) == 260


def test_a_long_listing_on_a_slow_mount_has_a_deadline_for_each_part(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part ends in time where all of them together do not."""
    count, clock = 3 * LISTED_AT_ONCE, [0.0]
    (folder := Path(storage.where) / "chunks" / "ab").mkdir(parents=True)
    for number in range(count):
        (folder / f"{number:06d}").touch()
    stat = os.stat

    def slow(path: Any, *arguments: Any, **named: Any) -> os.stat_result:
        clock[0] += "chunks" in str(path)
        return stat(path, *arguments, **named)

    monkeypatch.setattr(local.os, "stat", slow)
    timed, parts = DeadlineStorage._timed, []

    def one(self: DeadlineStorage, key: str, call: Any, *late: Any) -> Any:
        began = clock[0]
        found = timed(self, key, call, *late)
        parts.append(clock[0] - began)
        return found

    monkeypatch.setattr(DeadlineStorage, "_timed", one)
    assert sum(1 for _ in DeadlineStorage(storage, 60.0).list("chunks/")) == count
    assert max(parts) <= LISTED_AT_ONCE


def test_a_folder_that_cannot_be_read_is_no_empty_one(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("chunks/aa/1", "chunks/bb/2"):
        storage.put(name, b"1")
    scandir = os.scandir

    def failing(path: Any) -> Any:
        if Path(path).name == "bb":
            raise OSError(errno.EIO, "Input/output error")
        return scandir(path)

    monkeypatch.setattr(local.os, "scandir", failing)
    with pytest.raises(StorageUnavailableError, match="Input/output error"):
        keys(storage, "chunks/")
    assert keys(storage, "chunks/aa/") == ["chunks/aa/1"]


def test_a_file_in_the_place_of_the_runs_folder_is_no_empty_run(tmp_path: Path) -> None:
    (tmp_path / "r1").write_text("no folder")
    with pytest.raises(StorageError, match="must name a folder"):
        keys(LocalStorage(str(tmp_path), "r1"), "log/")


def address(folder: int, number: int) -> str:
    return f"{folder:02x}{number:062x}"


class Counted(LocalStorage):
    lists: list[str]
    sizes: list[str]

    def list(self, prefix: str) -> Iterator[StoredObject]:
        self.lists.append(prefix)
        return super().list(prefix)

    def size(self, key: str) -> int | None:
        self.sizes.append(key)
        return super().size(key)


def test_sizes_are_asked_of_what_a_commit_names_alone(memory_path: Path) -> None:
    storage = Counted(str(memory_path), "r1")
    storage.lists, storage.sizes = [], []
    many = [address(1, number) for number in range(FEW + 1)]
    few, gone = [address(2, number) for number in range(FEW)], [address(1, 99), address(3, 99)]
    others = [address(2, 77), address(4, 1)]
    for number, each in enumerate([*many, *few, *others]):
        storage.put(chunk_key(each), b"x" * number)
    sizes = ChunkSizes(storage)
    expected = {each: number for number, each in enumerate([*many, *few])}
    assert sizes.of([*many, *few, *gone]) == expected
    assert storage.lists == ["chunks/01/"]
    assert sorted(storage.sizes) == sorted(chunk_key(each) for each in [*few, gone[1]])
    assert sizes.of([*few, *gone]) == {each: expected[each] for each in few}
    assert len(storage.lists) + len(storage.sizes) == 1 + FEW + 1, "asked once"


def test_storage_that_fails_says_nothing_of_sizes(memory_path: Path) -> None:
    class Down(LocalStorage):
        def size(self, key: str) -> int | None:
            raise StorageUnavailableError("down")

    with pytest.raises(StorageUnavailableError, match="down"):
        ChunkSizes(Down(str(memory_path), "r1")).of([address(at, 1) for at in range(64)])
