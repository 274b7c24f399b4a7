"""Bytes between the debugger of one worker of this node and a person who has attached to it by calls.

The worker connects to a loopback socket that takes one connection, and that from this worker's process alone.
The link is closed, which lets the worker go on, where nobody asks for its bytes any more, and where its rank
has stood still too long.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from picotron_ray.runtime.heartbeat import PageView

log = logging.getLogger(__name__)
CONNECT_S = 660.0
"""For the worker to connect: after the end of the step at hand."""
SILENT_S = 20.0
"""Without a call of the person's."""
BUFFER_BYTES = 8 << 20
LOOK_S = 0.5
READ_BYTES = 1 << 16


class DebuggerLink:
    """One worker's link.

    Args:
        worker: its name.
        page: returns its heartbeat page; None: it is gone.
        generation: that its rank is of; the link ends with it.
        stop_s: longest time of one phase of it, and by how much a step may take longer than the others.
    """

    def __init__(
        self, worker: str, generation: tuple[int, int], page: Callable[[], PageView | None], stop_s: float
    ) -> None:
        self.worker, self.over = worker, ""
        self._page, self._stop_s, self._generation = page, stop_s, generation
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._socket: socket.socket | None = None
        self._buffer = bytearray()
        self._changed = threading.Condition()
        self._heard_s = time.monotonic()
        for work in (self._read, self._watch):
            threading.Thread(target=work, name=f"debugger-{work.__name__[1:]}", daemon=True).start()

    @property
    def connected(self) -> bool:
        """Whether the worker's debugger has connected."""
        return self._socket is not None

    def send(self, data: bytes) -> bool:
        """Send bytes to the debugger; False where there is none."""
        self._heard_s = time.monotonic()
        try:
            if self._socket is not None and not self.over:
                self._socket.sendall(data)
                return True
        except OSError as error:
            self.close(f"the debugger's connection broke: {error}")
        return False

    def receive(self, wait_s: float) -> bytes:
        """Return what the debugger has sent; waits so long for something."""
        self._heard_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._buffer or self.over, wait_s)
            data = bytes(self._buffer)
            self._buffer.clear()
            self._changed.notify_all()
        self._heard_s = time.monotonic()
        return data

    def close(self, why: str) -> None:
        """Close it; the first reason given is kept."""
        with self._changed:
            self.over = self.over or why
            self._changed.notify_all()
        for each in (self._listener, self._socket):
            if each is not None:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    # --- threads -------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            one = self._accepted()
            with self._changed:
                if self.over:  # meanwhile
                    one.close()
                    return
                self._socket = one
            while data := one.recv(READ_BYTES):
                with self._changed:
                    self._buffer += data
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: len(self._buffer) < BUFFER_BYTES or self.over)
            self.close("the debugger has ended its connection")
        except OSError as error:
            self.close(f"the debugger's connection broke: {error}")

    def _accepted(self) -> socket.socket:
        """Wait for this worker's own connection; any other process' is refused."""
        self._listener.settimeout(CONNECT_S)
        while True:
            one, address = self._listener.accept()
            page = self._page()
            if page is not None and _connects(page.pid, address[1], self.port):
                one.settimeout(None)
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._listener.close()
                return one
            one.close()

    def _watch(self) -> None:
        step, since_s = -1, time.monotonic()
        while not self.over:
            time.sleep(LOOK_S)
            now = time.monotonic()
            try:
                page = self._page()
            except OSError as error:  # out of files, for a while
                log.warning("the page of %s cannot be read: %s", self.worker, error)
                continue
            if page is not None and (page.step != step or page.phase == "hold"):
                step, since_s = page.step, now
            why = self._end_of(page, now, since_s)
            if why:
                self.close(why)

    def _end_of(self, page: PageView | None, now: float, since_s: float) -> str:
        """Why the link is to be closed; empty: it is not.

        Args:
            since_s: when the rank was first seen to be past its newest step.
        """
        if page is None:
            return f"worker {self.worker} has ended"
        if now - self._heard_s > SILENT_S:
            return "nobody has asked for it any more"
        if (page.term, page.n) != self._generation:
            return f"generation {self._generation[0]}.{self._generation[1]} of its rank has ended"
        if self.connected and now - page.phase_since_s > self._stop_s:
            return f"its rank has stood still for {self._stop_s:g} s in phase {page.phase}"
        if self.connected and now - since_s > self._stop_s + max(0.0, page.step_time_s):
            return f"a step of its rank has taken {self._stop_s:g} s longer than the one before"
        return ""


def _connects(pid: int, port: int, to: int) -> bool:
    """Whether a process holds the other end of a loopback connection."""
    with suppress(psutil.Error):
        return any(
            each.laddr.port == port and each.raddr and each.raddr.port == to
            for each in psutil.Process(pid).net_connections("tcp4")
        )
    return False
