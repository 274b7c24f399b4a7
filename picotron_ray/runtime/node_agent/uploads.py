"""Uploads of a node's slots: each is begun by a call that does not wait, and its end is told as a report.

Storage may be away for hours, so no call waits for it. One that is under way is joined. Its intents are
renewed until it is settled.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_reader import holds, set_pinned
from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.intents import Intents
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import CorruptError, PicotronError, SlotReusedError, StorageFullError
from picotron_ray.runtime.ray_cluster.names import ledger_folder

log = logging.getLogger(__name__)
MOST_UPLOADS = 4
Key = tuple[tuple[int, int], int, tuple[str, ...]]
"""Generation, step and slots of an upload."""


@dataclass(frozen=True, slots=True)
class Ended:
    """End of an upload: ``part`` of the manifest, encoded, or the ``error`` as ``messages.Uploaded`` has it.

    Fields:
        full: storage has no room.
    """

    generation: tuple[int, int]
    step: int
    slots: tuple[str, ...]
    part: bytes | None
    error: str = ""
    full: bool = False

    @property
    def key(self) -> Key:
        return self.generation, self.step, self.slots


class Uploads:
    """Uploads of one node; any thread may call it."""

    def __init__(self, job: JobConfig, node: str, folder: Path) -> None:
        self._job, self._owner, self._folder = job, node[:16], folder
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MOST_UPLOADS, thread_name_prefix="upload")
        self._under_way: dict[Key, Future[bytes]] = {}
        self._ended: SimpleQueue[Ended] = SimpleQueue()
        self._opened: tuple[Storage, Intents] | None = None

    def begin(self, generation: tuple[int, int], step: int, slots: tuple[str, ...]) -> None:
        """Begin to put slots into storage, unless that is under way; ``ended`` tells its end."""
        key: Key = ((generation[0], generation[1]), step, tuple(slots))
        with self._lock:
            if key in self._under_way:
                return
            self._under_way[key] = running = self._threads.submit(self.run, *key)
        running.add_done_callback(lambda done: self._end(key, done))

    def _end(self, key: Key, done: Future[bytes]) -> None:
        with self._lock:
            del self._under_way[key]
        with contextlib.suppress(CancelledError):  # the run ends
            error = done.exception()
            part = done.result() if error is None else None
            full = isinstance(error, StorageFullError)
            self._ended.put(Ended(*key, part, _told(error, key[2]), full))

    def ended(self) -> list[Ended]:
        """Return the uploads that ended since the last call."""
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def run(self, generation: tuple[int, int], step: int, slots: tuple[str, ...]) -> bytes:
        """Put slots into storage, in the calling thread."""
        storage, intents = self._storage()
        paths = [self._folder / name for name in slots]
        with self._lock:
            held = [path for path in paths if holds(path, (*generation, step))]
            _pin(held, reading=True)
        options: dict[str, Any] = {"owner": self._owner, "codec": self._job.checkpoint.codec}
        spilled = ledger_folder(self._folder)
        try:
            part = upload_slots(
                paths, storage, *generation, step, intents=intents, spilled=spilled, **options
            )
        except PicotronError:
            self._let_go(held, (generation, step, slots))
            raise
        return part.encode()

    def _let_go(self, held: list[Path], key: Key) -> None:
        """Let newer checkpoints take a failed upload's slots until it is asked for again.

        Not those that another upload of the state reads.
        """
        with self._lock:
            others = [
                slots for *state, slots in self._under_way if state == list(key[:2]) and slots != key[2]
            ]
            _pin([path for path in held if not any(path.name in slots for slots in others)], reading=False)

    def _storage(self) -> tuple[Storage, Intents]:
        with self._lock:
            if self._opened is None:
                storage = open_storage(self._job.storage, self._job.name)
                self._opened = storage, Intents(storage)
            return self._opened

    def settle(self, state: SlotKey, spared: Collection[SlotKey] = ()) -> None:
        """Let go of what was begun for states up to this one, but ``spared``; it is committed or given up."""
        if self._opened is not None:
            self._opened[1].settle(state, spared)

    def close(self) -> None:
        """Begin no more uploads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _pin(paths: list[Path], reading: bool) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # it was let go in between
            set_pinned(path, True, reading)


def _told(error: BaseException | None, slots: Collection[str]) -> str:
    """Words for the end of an upload; damage of anything but its slots is a failure of storage."""
    if error is None:
        return ""
    if isinstance(error, CorruptError) and error.where in slots:
        return f"corrupt:{error.where}"
    if isinstance(error, SlotReusedError):
        return f"gone:{error.where}"
    if not isinstance(error, PicotronError):
        log.error("an upload failed", exc_info=error)
    return (str(error).strip() or type(error).__name__).splitlines()[-1][:300]
