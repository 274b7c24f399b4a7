"""Sending of log lines to storage: the newest of a node now and then, and those of a worker that died.

What a node's disk has is gone with the node, and out of reach once the run is over. So its newest lines go
to storage once a minute where there are new ones, and at the end; a dead worker's as soon as its end is
known. A thread of its own does it, after everything else: storage that is away or full costs what would have
been sent. Each object is replaced as a whole. Of the dead there is a fixed number of names; of nodes those
stay that wrote last, since machines that come and go for months have ever new ones. One that has written
within hours stays too: it may write again between the listing and the deletion.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zstandard

from picotron_ray.checkpoint.storage.base import Storage, get_or_none
from picotron_ray.errors import CorruptError, PicotronError
from picotron_ray.observability.logs.store import newest_lines
from picotron_ray.runtime.ray_cluster.log_folders import COORDINATOR

log = logging.getLogger(__name__)
PREFIX = "logs/"
SHIP_S = 60.0
MOST_BYTES = 1 << 20
"""Of the lines that one object holds, before they are compressed."""
SETTLE_S = 1.5
"""Time in which the keeper has read what a worker wrote last."""
CLOSE_S = 2.0
MOST_WAITING = 32
DEAD_KEPT = 64
NODE_DIGITS = 16
"""Digits of a node's id in its key."""
NODES_KEPT = 4096
GONE_S = 6 * 3600.0
"""Since its last line, before a node's are removed."""
MOST_READ_BYTES = 256 << 20
"""Of the lines that one reader takes, before they are compressed: those of the objects written last."""
COLLECT_S = 3600.0
"""How often the coordinator looks for lines of more nodes."""
DELETE_BATCH, DELETE_S = 1000, 30.0
OLD_DIGITS = 4
"""Those of runs of earlier versions, where nodes may share a key."""


def node_key(node: str) -> str:
    """Key of a node's newest lines: one of its own, so that a thousand nodes do not replace each other's."""
    return f"{PREFIX}nodes/{node if node == COORDINATOR else node[:NODE_DIGITS]}.jsonl.zst"


def dead_key(slot: int) -> str:
    """Key of the last lines of a worker that died; ``slot`` counts round."""
    return f"{PREFIX}dead/{slot % DEAD_KEPT:02d}.jsonl.zst"


def free_slots(storage: Storage) -> Iterator[int]:
    """Count through the slots of dead workers, from those never used to those used longest ago."""
    used = {int(Path(entry.key).name[:2]): entry.mtime_s for entry in storage.list(f"{PREFIX}dead/")}
    return itertools.cycle(sorted(range(DEAD_KEPT), key=lambda slot: (used.get(slot, 0.0), slot)))


def drop_oldest_nodes(storage: Storage, kept: int = NODES_KEPT) -> int:
    """Remove the lines of the nodes that wrote longest ago, but for so many; returns how many were removed.

    Times are the store's own, to the last write of any node: the coordinator has just written.

    Raises:
        StorageError: the storage does not answer, or refuses.
    """
    entries = sorted(storage.list(f"{PREFIX}nodes/"), key=lambda entry: entry.mtime_s)
    gone_s = entries[-1].mtime_s - GONE_S if entries else 0.0
    old = [entry.key for entry in entries[: max(0, len(entries) - kept)] if entry.mtime_s < gone_s]
    until_s, left = time.monotonic() + DELETE_S, 0
    for first in range(0, len(old), DELETE_BATCH):
        left += len(storage.delete_many(old[first : first + DELETE_BATCH], until_s))
    return len(old) - left


def stored_nodes(storage: Storage) -> list[str]:
    """Name the nodes that storage has lines of, as their keys do. Raises StorageError: it does not answer."""
    names = (entry.key.removeprefix(f"{PREFIX}nodes/") for entry in storage.list(f"{PREFIX}nodes/"))
    return sorted(name.removesuffix(".jsonl.zst") for name in names)


def may_hold(key: str, node: str) -> bool:
    """Tell whether an object may have lines of a node, of which ``node`` is the id's first characters."""
    if not node or not key.startswith(f"{PREFIX}nodes/"):
        return True  # those of the dead are of any node, and few
    name = Path(key).name.split(".")[0]
    if len(name) == OLD_DIGITS:
        return name.startswith(node[:OLD_DIGITS])
    return name.startswith(node[: len(name)])


def stored_lines(storage: Storage, node: str = "") -> dict[str, list[bytes]]:
    """Lines that storage has of a run, by key: the newest objects, up to `MOST_READ_BYTES`.

    Args:
        node: first characters of a node's id, whose objects alone are read; empty: all.

    Raises:
        StorageError: it does not answer.
    """
    found: dict[str, list[bytes]] = {}
    wanted = sorted((e for e in storage.list(PREFIX) if may_hold(e.key, node)), key=lambda e: -e.mtime_s)
    left_bytes = MOST_READ_BYTES
    for number, entry in enumerate(wanted):
        if left_bytes <= 0:
            text = "%d objects of lines that were written longest ago are not read: `--node` reads one node's"
            log.warning(text, len(wanted) - number)
            break
        lines = _stored_text(storage, entry.key).splitlines(keepends=True)
        if lines:
            found[entry.key] = lines
            left_bytes -= sum(map(len, lines))
    return found


def _stored_text(storage: Storage, key: str) -> bytes:
    """Text of an object of lines; empty where it has been removed since it was listed, or is none of ours."""
    try:
        packed = get_or_none(storage, key, MOST_BYTES)
        if packed is None:
            return b""
        return zstandard.ZstdDecompressor().stream_reader(packed).read(2 * MOST_BYTES)  # whatever it says
    except (zstandard.ZstdError, CorruptError) as error:
        log.warning("%s cannot be read: %s", key, error)
        return b""


class LogShipping:
    """Sender of one folder's lines; any thread may ask."""

    def __init__(
        self, folder: Path, key: str, storage: Callable[[], Storage], count: Callable[[], int]
    ) -> None:
        """
        Args:
            storage: opens the run's storage; called on the thread that sends.
            count: tells how many lines there were, to see whether there are new ones.
        """
        self._folder, self._key, self._open, self._count = folder, key, storage, count
        self._waiting: queue.Queue[tuple[str, str] | None] = queue.Queue(MOST_WAITING)
        self._sent, self._collect_at = 0, 0.0
        self._opened: Storage | None = None
        self.dropped = 0
        """Sendings that were given up."""
        self._thread = threading.Thread(target=self._work, name="log-shipping", daemon=True)

    def begin(self) -> None:
        """Begin the thread."""
        self._thread.start()

    def send_worker(self, worker: str, key: str) -> bool:
        """Send a dead worker's last lines a little later; False where too many wait already."""
        try:
            self._waiting.put_nowait((worker, key))
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def close(self) -> None:
        """Send what is new, for so long as the end of a run may wait; what takes longer is given up."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _work(self) -> None:
        due = time.monotonic() + SHIP_S
        while True:
            try:
                asked = self._waiting.get(timeout=max(0.1, due - time.monotonic()))
            except queue.Empty:
                due = time.monotonic() + SHIP_S
                self._send_node()
                continue
            if asked is None:
                self._send_node()
                return
            time.sleep(SETTLE_S)
            worker, key = asked
            self._put(key, newest_lines(self._folder, MOST_BYTES, worker))

    def _send_node(self) -> None:
        count = self._count()
        if count != self._sent and self._put(self._key, newest_lines(self._folder, MOST_BYTES)):
            self._sent = count
            if self._key == node_key(COORDINATOR) and time.monotonic() >= self._collect_at:
                self._collect()

    def _collect(self) -> None:
        self._collect_at = time.monotonic() + COLLECT_S
        assert self._opened is not None
        try:
            if removed := drop_oldest_nodes(self._opened):
                log.info("lines of %d nodes that wrote longest ago are removed from storage", removed)
        except (PicotronError, OSError) as error:
            log.warning("lines of nodes that are gone stay in storage: %s", error)

    def _put(self, key: str, lines: list[bytes]) -> bool:
        try:
            if self._opened is None:
                self._opened = self._open()
            self._opened.put(key, zstandard.ZstdCompressor().compress(b"".join(lines)))
        except (PicotronError, OSError) as error:
            self.dropped += 1
            log.warning("%s is not in storage: %s", key, error)
            return False
        return True
