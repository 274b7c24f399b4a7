"""Shard service: hands out boxes of the sealed slots of one node, to whoever holds its token. Torch-free.

A member on another node opens a slot (its table of shards, header and ledger come first), then asks for the
boxes of shards that it needs, one frame each. Contiguous boxes are sent from the mapped slot itself. The
server looks at a shard's digest before it sends the first box of it, as its reader cannot where it does not
read all of it. Each answer is of one seal: a slot that was overwritten is refused. One pace holds for all
connections together. Connections hold a slot's memory, so an idle one is closed, and there are no more than
``MOST_CONNECTIONS``: who comes then hears that the service is busy, and comes again.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from picotron_ray.checkpoint.shard_service.channel import (
    MESSAGE,
    MOST_BYTES,
    REFUSAL,
    WAIT,
    Channel,
    Endpoint,
)
from picotron_ray.checkpoint.snapshot import ledger_spill
from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_reader import SlotHead, SlotView, open_slot
from picotron_ray.errors import CorruptError, PicotronError, SlotError
from picotron_ray.layout.shards import Box, element_type

log = logging.getLogger(__name__)
REQUEST_BYTES = 64 << 10
IDLE_S = 60.0
MOST_CONNECTIONS = 1024
MOST_HEADS = 32
"""Slots of which head and parsed table are kept for whoever opens them next."""
BACKLOG = 256
PAUSE_S = 0.1
"""Pause after a connection that could not be taken: the next one would fare no better at once."""
TELL_S = 60.0


class Pacer:
    """Common pace of many senders."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s or math.inf
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.taken_bytes = 0
        """Bytes that were sent so far, or are about to be."""

    def take(self, count: int, waiting: Callable[[], None], every_s: float) -> None:
        """Wait until ``count`` bytes may be sent; ``waiting`` is called so often meanwhile."""
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self.taken_bytes += count
            self._free_at = begin + count / self._bytes_per_s
        while (left_s := begin - time.monotonic()) > every_s:
            time.sleep(every_s)
            waiting()
        time.sleep(max(0.0, left_s))


class ShardServer:
    """Shard service of one folder of slots; threads of its own."""

    def __init__(
        self,
        folder: Path,
        host: str,
        timeout_s: float,
        bytes_per_s: float | None = None,
        withheld: Callable[[str, SlotKey], bool] = lambda name, key: False,
        spilled: Path | None = None,
    ) -> None:
        """Listen on a free port of ``host``.

        Args:
            timeout_s: longest that a client may take over one frame.
            bytes_per_s: most bytes a second, of all connections together; None: no limit.
            withheld: whether that state in a file of that name is not to be handed out.
            spilled: folder of what was spilled of ledgers (``ledger_spill``).
        """
        self._spilled = spilled or folder
        self._folder, self._timeout_s, self._withheld = folder, timeout_s, withheld
        self._pacer = Pacer(bytes_per_s)
        self._known = threading.Lock()  # of the two below, which all clients' threads use
        self._heads: dict[str, SlotHead] = {}  # by slot, those last that were opened last
        self._checked: dict[tuple[str, bytes], set[int]] = {}
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        self._closing = threading.Event()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.endpoint = Endpoint(host, self._listener.getsockname()[1], secrets.token_hex(32))
        threading.Thread(target=self._accept, name="shard-service", daemon=True).start()

    @property
    def served_bytes(self) -> int:
        """Bytes of shards that were handed out so far."""
        return self._pacer.taken_bytes

    def close(self) -> None:
        """Take no more connections; those that are open end by themselves."""
        self._closing.set()
        if self._listener.fileno() >= 0:
            # closing alone leaves a thread that waits in accept() there for ever
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        told = -math.inf
        while not self._closing.is_set():
            try:
                self._accept_one()
            except (OSError, RuntimeError) as error:  # too many open files, no more threads: for a while
                if self._closing.is_set():
                    return
                if time.monotonic() - told >= TELL_S:
                    told = time.monotonic()
                    log.warning("shard service: a connection cannot be taken, tried again: %r", error)
                self._closing.wait(PAUSE_S)

    def _accept_one(self) -> None:
        connection, _ = self._listener.accept()
        if not self._slots.acquire(blocking=False):
            Channel.refuse(connection)
            return
        client = threading.Thread(target=self._serve, args=(connection,), name="shard-client", daemon=True)
        try:
            client.start()
        except RuntimeError:
            connection.close()
            self._slots.release()
            raise

    def _serve(self, connection: socket.socket) -> None:
        views: dict[str, SlotView] = {}
        try:
            channel = Channel.accept(connection, self.endpoint.token, self._timeout_s)
            while True:
                _, request = channel.receive(REQUEST_BYTES, idle_s=IDLE_S)
                self._answer(channel, views, json.loads(bytes(request)))
        except PicotronError as error:
            log.debug("shard service: %s", error)
        except (ValueError, LookupError, TypeError) as error:  # a client of another version, or none of ours
            log.warning("shard service: a request that cannot be read: %r", error)
        finally:
            connection.close()
            self._slots.release()

    def _answer(self, channel: Channel, views: dict[str, SlotView], request: dict[str, Any]) -> None:
        name = Path(request["slot"]).name
        try:
            if request["what"] == "open":
                self._open(channel, views, name)
            elif request["what"] == "spilled":
                self._send_spilled(channel, Path(request["name"]).name)
            elif request["what"] == "check":
                self._sealed(views, name)
                channel.send_json(MESSAGE, {})
            else:
                box = Box(tuple(request["offset"]), tuple(request["size"]))
                self._read(channel, self._sealed(views, name), request["shard"], box)
        except (CorruptError, SlotError) as error:
            kind = "corrupt" if isinstance(error, CorruptError) and error.where == name else "gone"
            channel.send_json(REFUSAL, {"kind": kind, "text": str(error)})

    def _open(self, channel: Channel, views: dict[str, SlotView], name: str) -> None:
        try:
            view = open_slot(self._folder / name, name)
        except CorruptError as error:  # unsealed: overwritten since it was chosen
            raise SlotError(str(error)) from error
        if self._withheld(name, view.header.key):
            raise SlotError(f"slot {name} is set aside")
        with self._known:
            view.share_head(self._heads)
            _keep_last(self._heads, MOST_HEADS)
        views[name] = view
        head = view.head()
        channel.send_json(MESSAGE, {"lengths": [len(part) for part in head]})
        _send_all(channel, b"".join(head))

    def _send_spilled(self, channel: Channel, name: str) -> None:
        """Send a spilled part of a ledger, or that it is not here: its steps are committed."""
        try:
            data = (self._spilled / name).read_bytes() if name.endswith(ledger_spill.SUFFIX) else b""
        except FileNotFoundError:
            data = b""
        channel.send_json(MESSAGE, {"length": len(data)})
        _send_all(channel, data)

    def _sealed(self, views: dict[str, SlotView], name: str) -> SlotView:
        view = views[name]
        if not view.still_sealed():
            raise SlotError(f"slot {name} was overwritten while it was read")
        return view

    def _read(self, channel: Channel, view: SlotView, index: int, box: Box) -> None:
        """Send a box of a shard; ``box`` counts from the shard's own first element."""
        entry = view.shards[index]
        elements = np.frombuffer(view.raw(entry), dtype=element_type(entry.shard.dtype))
        elements = elements.reshape(entry.shard.box.size)
        cut = elements[tuple(slice(at, at + n) for at, n in zip(box.offset, box.size, strict=True))]
        if cut.shape != box.size or cut.nbytes > MOST_BYTES:
            raise ValueError(f"box {box} of a shard of {entry.shard.box.size}")
        with self._known:
            checked = self._checked.setdefault((view.name, view.seal), set())
            _keep_last(self._checked, MOST_CONNECTIONS)
        if index not in checked:
            view.checked(entry)
            checked.add(index)
        # a reader that hears nothing gives a healthy node up, and all of them would at once
        self._pacer.take(cut.nbytes, lambda: channel.send(WAIT, b""), self._timeout_s / 4)
        channel.send(MESSAGE, np.ascontiguousarray(cut).reshape(-1).view(np.uint8).data)


def _keep_last(known: dict[Any, Any], most: int) -> None:
    while len(known) > most:
        del known[next(iter(known))]


def _send_all(channel: Channel, data: bytes) -> None:
    for at in range(0, len(data), MOST_BYTES):
        channel.send(MESSAGE, data[at : at + MOST_BYTES])
