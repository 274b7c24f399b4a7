"""Bytes between the debugger of one worker of this node and a person who has attached to it by calls.

The worker connects to a loopback socket that takes one connection, and that from this worker's process alone.
The link is closed, which lets the worker go on, where nobody asks for its bytes any more, and where its rank
has stood still too long.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from picotron_ray.runtime.heartbeat import PageView

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
        stop_s: longest time of one phase of it.
    """

    def __init__(self, worker: str, page: Callable[[], PageView | None], stop_s: float) -> None:
        self.worker, self.over = worker, ""
        self._page, self._stop_s = page, stop_s
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
            self._socket = self._accepted()
            while data := self._socket.recv(READ_BYTES):
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
        while not self.over:
            time.sleep(LOOK_S)
            now, page = time.monotonic(), self._page()
            if page is None:
                self.close(f"worker {self.worker} has ended")
            elif now - self._heard_s > SILENT_S:
                self.close("nobody has asked for it any more")
            elif self.connected and page.phase != "idle" and now - page.phase_since_s > self._stop_s:
                self.close(f"its rank has stood still for {self._stop_s:g} s in phase {page.phase}")


def _connects(pid: int, port: int, to: int) -> bool:
    """Whether a process holds the other end of a loopback connection."""
    with suppress(psutil.Error):
        return any(
            each.laddr.port == port and each.raddr and each.raddr.port == to
            for each in psutil.Process(pid).net_connections("tcp4")
        )
    return False
