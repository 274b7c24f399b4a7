"""Slots of other nodes, as one generation's restore reads them: through the shard services of their agents.

Whatever waits here can be left: an interrupt ends it within a tenth of a second. A node that is frozen or cut
off is given up after ``snapshot.fetch_timeout_s``: another one is read, or the coordinator chooses anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from picotron_ray.checkpoint.shard_service.channel import POLL_S, Endpoint
from picotron_ray.checkpoint.shard_service.client import RemoteSlot, ShardClient
from picotron_ray.checkpoint.snapshot.ledger_spill import keep, read, split_marker, steps_of
from picotron_ray.checkpoint.snapshot.slot_reader import SlotView
from picotron_ray.config.schema.service import SnapshotConfig
from picotron_ray.coordinator.messages import SlotInfo
from picotron_ray.errors import CorruptError
from picotron_ray.runtime.heartbeat import Page

log = logging.getLogger(__name__)
LIMIT_WAITS = 2.0  # x snapshot.fetch_timeout_s: without a sign of this worker for so long, it hangs
Find = Callable[[str, Callable[[], None]], Endpoint]
"""Finds the shard service of a node, and calls the second argument meanwhile."""


class RemoteSlots:
    """Slots of other nodes; one connection to each node, closed by ``close``."""

    def __init__(
        self, page: Page, config: SnapshotConfig, find: Find, leave_if_asked: Callable[[], None]
    ) -> None:
        """
        Args:
            leave_if_asked: raises where this member is to leave its generation.
        """
        self._page, self._find, self._leave_if_asked = page, find, leave_if_asked
        self._timeout_s = config.fetch_timeout_s
        self._clients: dict[str, ShardClient] = {}

    def open(self, info: SlotInfo) -> RemoteSlot:
        """Open a slot; raises SlotUnreachableError where its node does not answer in time."""
        if info.node not in self._clients:
            find = partial(self._find, info.node, self._go_on)
            self._clients[info.node] = ShardClient(find, self._timeout_s, self._go_on)
        key = (info.generation.term, info.generation.n, info.step)
        return RemoteSlot(self._clients[info.node], info.slot, key)

    def _go_on(self) -> None:
        self._leave_if_asked()
        self._page.phase("restore", LIMIT_WAITS * self._timeout_s)

    def wait(self) -> None:
        """Say that this worker lives and waits for others; raises where it is to leave."""
        self._leave_if_asked()
        self._page.phase("queue", LIMIT_WAITS * self._timeout_s)

    def pause(self, seconds: float) -> None:
        """Wait so long for nodes that are busy."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.wait()
            time.sleep(min(POLL_S, left))
        self._go_on()

    def let_go(self, node: str) -> None:
        """Close the connection to a node; `open` makes another one."""
        if node in self._clients:
            self._clients[node].close()

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


def fetch_spilled(slot: SlotView | RemoteSlot, folder: Path | None) -> None:
    """Bring what was spilled of a remote slot's ledger to this node, so that it outlives the other one.

    Where the disk has no room that is said, and the other node's copy has to do.

    Raises:
        CorruptError: a file does not match its name.
        SlotUnreachableError: the other node does not answer.
    """
    (name, first), _ = split_marker(slot.header.ledger)
    while name and folder is not None and isinstance(slot, RemoteSlot):
        try:
            if not (folder / name).exists() and not _fetch_one(slot, folder, name):
                return
            name = "" if steps_of(name)[0] <= first else read(folder, name)[0]
        except OSError as error:
            log.warning("spilled ledger %s stays on its node alone: %s", name, error)
            return


def _fetch_one(slot: RemoteSlot, folder: Path, name: str) -> bool:
    """Bring one file; False where its steps are committed by now: the upload finds them in storage."""
    data = slot.spilled(name)
    if data:
        try:
            keep(folder, name, data)
        except CorruptError as error:
            raise CorruptError(str(error), where=slot.name) from error
    return bool(data)
