"""Local storage: the conformance suite, and one clear line for every way it can be unusable."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.storage import local
from picotron_ray.checkpoint.storage.base import (
    Storage,
    StoredObject,
    encode_json,
    get_json,
    get_or_none,
    probe,
)
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.manifest import load_manifest
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import (
    AlreadyExistsError,
    CorruptError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)
from tests.support.checkpoint.storage_suite import StorageConformance


@pytest.fixture
def storage(memory_path: Path) -> Storage:
    return open_storage(StorageConfig(url=str(memory_path / "runs")), "r1")


class TestLocalStorage(StorageConformance):
    pass


def test_runs_do_not_see_each_other(tmp_path: Path) -> None:
    first, second = (open_storage(StorageConfig(url=f"file://{tmp_path}"), run) for run in ("a", "b"))
    first.put("x", b"1")
    assert second.size("x") is None
    assert (tmp_path / "a" / "x").read_bytes() == b"1"


@pytest.mark.parametrize("key", ["", "../x", "a//b", "a/../../x", ".tmp/x", "/etc/passwd"])
def test_keys_cannot_leave_the_folder(storage: Storage, key: str) -> None:
    with pytest.raises(StorageError, match="not a key"):
        storage.put(key, b"")


def refused(url: object) -> str:
    with pytest.raises(StorageError) as caught:
        probe(open_storage(StorageConfig(url=str(url)), "r1"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_probe_leaves_no_object_and_no_folder(tmp_path: Path) -> None:
    probe(open_storage(StorageConfig(url=str(tmp_path)), "r1"))
    assert [path.name for path in (tmp_path / "r1").iterdir()] == [".tmp"]


def test_missing_folder_is_not_created_on_the_way(tmp_path: Path) -> None:
    assert "mount" in refused(tmp_path / "not-mounted" / "runs")
    assert not (tmp_path / "not-mounted").exists()


def test_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("x")
    assert "must name a folder" in refused(tmp_path / "runs")
    assert "missing" in refused(tmp_path / "runs" / "deeper")


def test_file_system_that_takes_no_folders() -> None:
    assert "cannot be created" in refused("/proc/self/runs")


PROBE = """
import sys
from picotron_ray.checkpoint.storage.base import probe
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.config.schema.service import StorageConfig
from picotron_ray.errors import StorageError
storage = open_storage(StorageConfig(url=sys.argv[1]), "r1")
try:
    probe(storage)
    for i in range(int(sys.argv[2])):
        storage.put(f"x{i}", bytes(100_000))
except StorageError as error:
    print(type(error).__name__, error)
"""


def test_full_and_read_only_file_systems_for_real(tmp_path: Path) -> None:
    """A 1 MB file system of our own, in a mount namespace of our own."""
    mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
    script = (
        f'{mount} && "$0" -c "$1" {tmp_path} 12; mount -o remount,ro {tmp_path} && "$0" -c "$1" {tmp_path} 0'
    )
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False, capture_output=True).returncode:
        pytest.skip("mount namespaces are not permitted here")
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, sys.executable, PROBE],
        check=True,
        capture_output=True,
        text=True,
    )
    full, read_only = done.stdout.splitlines()
    assert full.startswith(
        f"StorageFullError {tmp_path}/r1 is full (No space left on device) while writing x"
    )
    assert read_only.startswith(f"StorageError {tmp_path}/r1 cannot be written (Read-only file system)")


def test_unknown_kind() -> None:
    assert "gs://" in refused("gs://bucket/x")


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (errno.ENOSPC, StorageFullError, "is full"),
        (errno.EDQUOT, StorageFullError, "is full"),
        (errno.EROFS, StorageError, "cannot be written"),
        (errno.EACCES, StorageError, "cannot be written"),
        (errno.EIO, StorageUnavailableError, "check the disk"),
        (errno.ESTALE, StorageUnavailableError, "check the disk"),
    ],
)
def test_system_errors_are_named(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], text: str
) -> None:
    storage.put("keep", b"old")

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local.os, "fsync", fail)
    with pytest.raises(kind, match=text) as caught:
        storage.put("keep", b"new")
    assert type(caught.value) is kind
    monkeypatch.undo()
    assert storage.get("keep") == b"old", "a failed put replaces nothing"
    assert [entry.key for entry in storage.list("")] == ["keep"]


def test_folder_removed_under_a_run(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path), "r1")
    storage.put("a", b"1")
    (tmp_path / "r1").rename(tmp_path / "elsewhere")
    for key in ("a", "intents/b"):
        with pytest.raises(StorageError, match=r"r1 was removed while .*; restore it from a copy"):
            storage.put(key, b"2")
    assert not (tmp_path / "r1").exists(), "below an unmounted disk nothing is made"
    (tmp_path / "r1" / "log").mkdir(parents=True)  # a copy, without what is hidden in it
    storage.put("a", b"3")
    assert storage.get("a") == b"3"


def test_many_writers_start_at_once(memory_path: Path) -> None:
    """Each new writer cleans up while the others' temporary files come and go."""

    def write(number: int) -> None:
        LocalStorage(str(memory_path), "r1").put(f"x{number}", b"1")

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(400)))
    assert len(list(LocalStorage(str(memory_path), "r1").list("x"))) == 400


def test_left_over_temporary_files_are_cleaned(tmp_path: Path) -> None:
    (tmp_path / "r1" / ".tmp").mkdir(parents=True)
    old, new = tmp_path / "r1" / ".tmp" / "old", tmp_path / "r1" / ".tmp" / "new"
    old.write_text("x")
    new.write_text("x")
    os.utime(old, (0, 0))
    storage = LocalStorage(str(tmp_path), "r1")
    storage.put("a", b"1")
    assert not old.exists()
    assert new.exists()
    assert [entry.key for entry in storage.list("")] == ["a"]


def test_an_object_is_durable_before_it_is_published_and_so_is_its_name(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of it stays open or in .tmp."""
    storage.put("a/first", b"")
    folder, open_before = Path(storage.where), len(os.listdir("/proc/self/fd"))
    seen: list[tuple[bool, list[str]]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append((name == folder / "a", sorted(os.listdir(folder / "a"))))
        fsync(descriptor)

    monkeypatch.setattr(local.os, "fsync", noted)
    storage.put("a/second", b"x")
    storage.put_if_absent("a/third", b"x")
    names = ["first", "second", "third"]
    assert seen == [(False, names[:1]), (True, names[:2]), (False, names[:2]), (True, names)]
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert list((folder / ".tmp").iterdir()) == []
    umask = os.umask(0o022)
    os.umask(umask)
    assert (folder / "a" / "second").stat().st_mode & 0o777 == 0o644 & ~umask


class Odd:
    """Storage whose reads, listings or conditional puts are wrong."""

    where = "there"

    def __init__(self, read: bool = True, listed: bool = True, conditional: bool = True) -> None:
        self.read, self.listed, self.conditional = read, listed, conditional
        self.objects: dict[str, bytes] = {}

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self.conditional and key in self.objects:
            raise AlreadyExistsError(key)
        self.objects[key] = data

    def get(self, key: str) -> bytes:
        return self.objects[key] if self.read else b""

    def list(self, prefix: str) -> list[StoredObject]:
        return [StoredObject(key, 0, 0.0) for key in self.objects if self.listed]

    def delete(self, key: str) -> None:
        del self.objects[key]


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("read", "an object just written does not read back; use another storage"),
        ("listed", "an object just written does not read back; use another storage"),
        (
            "conditional",
            "conditional writes are not honoured (If-None-Match), so two coordinators could both commit;"
            " use a storage that supports them",
        ),
    ],
)
def test_a_storage_that_cannot_be_relied_on_is_refused(odd: str, why: str) -> None:
    probe(Odd())  # type: ignore[arg-type]
    storage = Odd(**{odd: False})
    with pytest.raises(StorageError) as caught:
        probe(storage)  # type: ignore[arg-type]
    assert str(caught.value) == f"there: {why}"
    assert storage.objects == {}


def test_json_is_canonical_and_bounded() -> None:
    assert encode_json({"b": [1, 2], "a": {}}) == b'{"a":{},"b":[1,2]}'
    asked: list[tuple[str, int, int]] = []

    class Recording:
        where = "there"

        def get_range(self, key: str, start: int, length: int) -> bytes:
            asked.append((key, start, length))
            return b"{}"

    storage: Any = Recording()
    assert (get_json(storage, "a"), get_or_none(storage, "b")) == ({}, b"{}")
    with pytest.raises(CorruptError, match="schema None"):
        load_manifest(storage, "c")
    assert asked == [("a", 0, 2**26 + 1), ("b", 0, 2**26 + 1), ("c", 0, 2**30 + 1)]


def test_a_read_takes_no_more_memory_than_there_are_bytes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    pread = os.pread

    def noted(descriptor: int, length: int, start: int) -> bytes:
        asked.append((length, start))
        return pread(descriptor, length, start)

    storage.put("r", bytes(range(100)))
    monkeypatch.setattr(local.os, "pread", noted)
    assert storage.get_range("r", 95, 1 << 40) == bytes(range(95, 100))
    assert storage.get_range("r", 0, 3) == bytes(range(3))
    assert storage.get_range("r", 101, 3) == b""
    assert asked == [(5, 95), (3, 0), (0, 101)]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.EFBIG, "File too large"),
            "there is full (File too large) while writing k; free space or lower checkpoint.keep_last",
        ),
        (
            OSError(errno.EPERM, "Not permitted"),
            "there cannot be written (Not permitted); make it writable or set another storage.url",
        ),
        (
            OSError(errno.ENOTDIR, "Not a directory"),
            "there: Not a directory on the way to k; storage.url must name a folder",
        ),
        (
            OSError(errno.EISDIR, "Is a directory"),
            "there: Is a directory on the way to k; storage.url must name a folder",
        ),
        (
            OSError(errno.EMLINK, "Too many links"),
            "there: the file system has no hard links (Too many links); use another storage.url",
        ),
        (OSError("odd"), "there: odd at k; check the disk or mount"),
    ],
)
def test_a_system_error_in_one_line(error: OSError, line: str) -> None:
    assert str(local._explained("there", "k", error)) == line


def test_temporary_files_are_kept_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age_s in (86_399, 86_400, 86_401):
        (tmp_path / str(age_s)).touch()
        os.utime(tmp_path / str(age_s), (1e9 - age_s, 1e9 - age_s))
    monkeypatch.setattr(local.time, "time", lambda: 1e9)
    local._remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["86399", "86400"]


# --- a full disk -----------------------------------------------------------------------------------------


def test_collection_can_write_on_a_disk_that_is_full(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the reserve, which is for the log and for lists of what is to be deleted alone."""
    storage.put_if_absent("log/00000001.json", b"{}")
    reserve = Path(storage.where) / ".tmp" / "reserve"
    assert reserve.stat().st_blocks * 512 >= local.RESERVE_BYTES
    real = local._write_durably

    def full(path: Path, data: bytes) -> None:
        if reserve.exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(local, "_write_durably", full)
    for key in ("chunks/00/x", "summary.json"):
        with pytest.raises(StorageFullError, match="is full"):
            storage.put(key, b"x")
    assert reserve.exists()
    storage.put_if_absent("log/00000002.json", b"{}")
    assert not reserve.exists()
    storage.put("condemned/1.json", b"{}")
    assert not reserve.exists(), "it is not taken again at once: that would fill the disk anew"
    storage.delete("condemned/1.json")
    monkeypatch.setattr(local, "_write_durably", real)
    storage.put("clock/now", b"")
    assert reserve.exists(), "there may be room again"
    assert {entry.key for entry in storage.list("")} == {
        "log/00000001.json",
        "log/00000002.json",
        "clock/now",
    }


@pytest.mark.deep
def test_a_full_disk_ends_nothing_and_is_freed_by_collection(tmp_path: Path) -> None:
    """A real one: a small memory file system that is filled up between two saves."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mount namespaces are not permitted here")
    command = ["unshare", "-rm", sys.executable, "-m", "tests.support.checkpoint.full_disk", str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["full"] == "No space left on device"
    for name in ("save", "end"):
        assert said[name].startswith(f"StorageFullError: {disk}/runs/r is full (No space left on device)")
    assert said["collect"] == 2, "the commit of step 5: its chunk and its manifest"
    assert said["good"] == [10, True]
    assert said["reports"] == [[20, []], [10, []]]
    assert said["left"] == ["reserve"], "no half of a file"
