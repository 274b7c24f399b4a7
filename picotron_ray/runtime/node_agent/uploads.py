"""Uploads of a node's slots: those under way are joined, and their intents renewed until they are settled."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from picotron_ray.checkpoint.snapshot.slot_reader import holds, set_pinned
from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.intents import Intents
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import PicotronError
from picotron_ray.runtime.ray_cluster.names import ledger_folder

MOST_UPLOADS = 4


class Uploads:
    """Uploads of one node; any thread may call it."""

    def __init__(self, job: JobConfig, node: str, folder: Path) -> None:
        self._job, self._owner, self._folder = job, node[:16], folder
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MOST_UPLOADS, thread_name_prefix="upload")
        self._under_way: dict[tuple[Any, ...], Future[dict[str, Any]]] = {}
        self._opened: tuple[Storage, Intents] | None = None

    def upload(self, generation: tuple[int, int], step: int, slots: tuple[str, ...]) -> dict[str, Any]:
        """Put slots into storage, or wait for the upload of them that is under way; returns its part."""
        key = (generation, step, slots)
        with self._lock:
            running = self._under_way.get(key)
            if running is None:
                running = self._threads.submit(self.run, generation, step, slots)
                self._under_way[key] = running
                running.add_done_callback(lambda _: self._under_way.pop(key, None))
        return running.result()

    def run(self, generation: tuple[int, int], step: int, slots: tuple[str, ...]) -> dict[str, Any]:
        """Put slots into storage, in the calling thread."""
        storage, intents = self._storage()
        paths = [self._folder / name for name in slots]
        held = [path for path in paths if holds(path, (*generation, step))]
        _pin(held, reading=True)
        options: dict[str, Any] = {"owner": self._owner, "codec": self._job.checkpoint.codec}
        spilled = ledger_folder(self._job.name)
        try:
            part = upload_slots(
                paths, storage, *generation, step, intents=intents, spilled=spilled, **options
            )
        except PicotronError:
            _pin(held, reading=False)  # until it is asked for again, a newer checkpoint may take the slots
            raise
        return part.to_dict()

    def _storage(self) -> tuple[Storage, Intents]:
        with self._lock:
            if self._opened is None:
                storage = open_storage(self._job.storage, self._job.name)
                self._opened = storage, Intents(storage)
            return self._opened

    def settle(self, state: tuple[int, int, int]) -> None:
        """Let go of what was begun for states up to this one; it is committed or given up."""
        if self._opened is not None:
            self._opened[1].settle(state)

    def close(self) -> None:
        """Begin no more uploads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _pin(paths: list[Path], reading: bool) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # it was let go in between
            set_pinned(path, True, reading)
