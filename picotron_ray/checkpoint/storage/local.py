"""Storage in a local (or POSIX-mounted) folder.

An object is written to a temporary file, fsync'd, and published by ``rename`` (put) or by ``link``
(put_if_absent: exactly one link of a name can succeed), then the folder is fsync'd. Temporary files
live in ``.tmp`` and never appear in listings; ones that a killed writer left are removed after a day by
the next process that writes.

A disk that is full must not keep collection from freeing it, which has to write a little first. So
``.tmp/reserve`` holds some space, which is given up for entries of the log and lists of what is to be deleted
where there is no other, and taken again after deletions.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from picotron_ray.checkpoint.storage.base import StoredObject, delete_each
from picotron_ray.errors import (
    REMOVED,
    AlreadyExistsError,
    NotFoundError,
    StorageError,
    StorageFullError,
    StorageUnavailableError,
)

_TMP = ".tmp"
_STALE_TMP_S = 86_400.0
_RESERVE, RESERVE_BYTES = "reserve", 1 << 20
_HOUSEKEEPING = ("log/", "condemned/", "clock/")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_NO_LINKS = (errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
T = TypeVar("T")


class LocalStorage:
    """Objects as files under ``<root>/<run>``."""

    def __init__(self, root: str, run: str) -> None:
        self._root = Path(root).expanduser().absolute()
        self._base = self._root / run
        self._ready = self._reserved = False

    @property
    def where(self) -> str:
        return str(self._base)

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data, os.replace)

    def put_if_absent(self, key: str, data: bytes) -> None:
        try:
            self._write(key, data, os.link)
        except FileExistsError:
            if self.get(key) != data:
                raise AlreadyExistsError(f"{key} exists already in {self.where}") from None

    def get(self, key: str) -> bytes:
        return self._guarded(key, lambda: self._path(key).read_bytes())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        def read() -> bytes:
            with self._path(key).open("rb") as file:
                there = os.fstat(file.fileno()).st_size - start
                return os.pread(file.fileno(), max(0, min(length, there)), start)

        return self._guarded(key, read)

    def size(self, key: str) -> int | None:
        try:
            return self._guarded(key, lambda: self._path(key).stat().st_size)
        except NotFoundError:
            return None

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Walk folder by folder: who takes some objects at a time waits for those alone."""
        inside = prefix.rpartition("/")[0]
        yield from self._walk(f"{inside}/" if inside else "", prefix)

    def delete(self, key: str) -> None:
        self._guarded(key, lambda: self._path(key).unlink(missing_ok=True))
        self._reserved = False  # there may be room for it again

    def delete_many(self, keys: Sequence[str], until_s: float) -> Sequence[str]:
        return delete_each(self.delete, keys, until_s)

    def _walk(self, inside: str, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects below a folder in the order of their keys, one file's size after the other.

        Args:
            inside: key of the folder, with a slash at its end; "" for the run's own.
        """
        for name in self._guarded(prefix, lambda: _names(self._base / inside)):
            key = inside + name
            if name.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    yield from self._walk(key, prefix)
            elif key.startswith(prefix):
                stat = self._guarded(key, partial(_stat, self._base / key))
                if stat is not None:
                    yield StoredObject(key, stat.st_size, stat.st_mtime)

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not all(parts) or {".", "..", _TMP} & set(parts):
            raise StorageError(f"{key!r} is not a key of this storage")
        return self._base.joinpath(*parts)

    def _write(self, key: str, data: bytes, publish: Callable[[str, str], object]) -> None:
        def write() -> None:
            first = not self._ready
            self._prepare()
            try:
                self._publish(key, data, publish)
            except FileNotFoundError as error:
                if not first and not (self._base / "log").is_dir():
                    raise StorageError(f"{self.where} {REMOVED}; restore it from a copy") from error
                # a refused launch took its empty folders away in between, or a copy came back without .tmp
                self._ready = False
                self._prepare()
                self._publish(key, data, publish)

        self._guarded(key, write)

    def _publish(self, key: str, data: bytes, publish: Callable[[str, str], object]) -> None:
        target, temporary = self._path(key), self._base / _TMP / uuid.uuid4().hex
        try:
            self._write_file(key, temporary, data)  # first: it makes no folder where the run's is gone
            target.parent.mkdir(parents=True, exist_ok=True)
            publish(str(temporary), str(target))
            _sync_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)

    def _write_file(self, key: str, temporary: Path, data: bytes) -> None:
        """Write a file; one that collection needs may take the reserve of a full disk."""
        if not key.startswith(_HOUSEKEEPING):
            return _write_durably(temporary, data)
        reserve = self._base / _TMP / _RESERVE
        if not self._reserved:
            self._reserved = _reserve(reserve)
        try:
            _write_durably(temporary, data)
        except OSError as error:
            if error.errno not in _FULL or not reserve.exists():
                raise
            reserve.unlink(missing_ok=True)
            self._reserved = True  # not to be taken at once again, but after a deletion
            temporary.unlink(missing_ok=True)
            _write_durably(temporary, data)
        return None

    def _prepare(self) -> None:
        """Make the run's folder, but never the way to it: an unmounted disk must not be written into."""
        if self._ready:
            return
        if not self._root.parent.is_dir():
            raise StorageError(
                f"storage.url {self._root} is missing and so is its parent folder; create it or mount it"
            )
        for folder in (self._root, self._base):
            if folder.exists() and not folder.is_dir():
                raise StorageError(f"{folder} is a file; storage.url must name a folder")
        try:
            (self._base / _TMP).mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # a file system that takes no folders
            raise StorageError(f"{self._base} cannot be created; set another storage.url") from error
        _remove_stale(self._base / _TMP)
        self._ready = True

    def _guarded(self, key: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except FileExistsError:
            raise
        except FileNotFoundError as error:
            raise NotFoundError(f"{key} does not exist in {self.where}") from error
        except OSError as error:
            raise _explained(self.where, key, error) from error


def _names(folder: Path) -> list[str]:
    """Names in a folder, as keys are sorted: those of folders end in a slash. None where there is none."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:  # deleted meanwhile
        for entry in entries:
            if not entry.is_dir():
                found.append(entry.name)
            elif entry.name != _TMP and not entry.is_symlink():
                found.append(f"{entry.name}/")
    return sorted(found)


def _stat(path: Path) -> os.stat_result | None:
    """Stat a file; None where it was deleted since it was listed."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(path)
    return None


def folders_to_make(url: str, run: str) -> list[Path]:
    """List the folders that the first write of a run would make, the innermost first."""
    root = Path(url.removeprefix("file://")).expanduser().absolute()
    wanted = (root / run / _TMP, root / run, root, *root.parents)
    return [folder for folder in wanted if not folder.exists()]


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove folders, the innermost first, up to one in which there is something by now."""
    with contextlib.suppress(OSError):
        for folder in folders:
            if folder.exists():
                folder.rmdir()


def _explained(where: str, key: str, error: OSError) -> StorageError:
    said = error.strerror or str(error)
    if error.errno in _FULL:
        return StorageFullError(
            f"{where} is full ({said}) while writing {key}; free space or lower checkpoint.keep_last"
        )
    if error.errno in _READ_ONLY:
        return StorageError(
            f"{where} cannot be written ({said}); make it writable or set another storage.url"
        )
    if error.errno in (errno.ENOTDIR, errno.EISDIR):
        return StorageError(f"{where}: {said} on the way to {key}; storage.url must name a folder")
    if error.errno in _NO_LINKS:
        return StorageError(f"{where}: the file system has no hard links ({said}); use another storage.url")
    return StorageUnavailableError(f"{where}: {said} at {key}; check the disk or mount")


def _reserve(path: Path) -> bool:
    """Take the reserve, as far as there is room; False where it is to be tried again."""
    if path.exists():
        return True
    try:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
    except FileExistsError:
        return True
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in _FULL:
            raise
        return False
    return True


def _remove_stale(folder: Path) -> None:
    """Remove what killed writers left; other writers' files come and go meanwhile."""
    for left in folder.iterdir():
        try:
            if left.name != _RESERVE and left.stat().st_mtime < time.time() - _STALE_TMP_S:
                left.unlink()
        except FileNotFoundError:  # published by its writer since the listing
            continue


def _write_durably(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
