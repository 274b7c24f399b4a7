"""TCP proxy before a server, with the faults of real networks and gateways.

``mode`` says what happens to requests and their answers from now on, also on connections that are open:

=============  =======================================================================================
pass           bytes go through
delay          answers come ``delay_s`` late
cut            the connection is reset as soon as a request arrives; the server sees nothing of it
swallow        a black hole: bytes go nowhere, the connection stays
truncate       half of an answer arrives, then the connection is reset
lost-reply     the server does what it is asked, its answer is lost with the connection
500, 503       the gateway answers with an error by itself
drip           answers come a byte in ``drip_s``; without a server, an answer that never ends
=============  =======================================================================================

``left`` bounds how many answers are spoiled before all passes again.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

DRIP_S = 0.1
ERRORS = {"500": b"500 Internal Server Error", "503": b"503 Slow Down"}
CODES = {"500": b"InternalError", "503": b"SlowDown"}
CONTINUE = b"HTTP/1.1 100"
NEVER = 1 << 30


class TcpProxy:
    """Listener before ``target``; without one it only swallows or drips."""

    def __init__(self, target: tuple[str, int] | None = None, mode: str = "pass") -> None:
        self.mode, self.left, self._target = mode, NEVER, target
        self.delay_s, self.drip_s = 0.5, DRIP_S
        self.spoiled = 0  # answers that did not arrive whole, or late
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self._closing = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def fail(self, mode: str, times: int = NEVER) -> None:
        """Spoil the next answers."""
        with self._lock:
            self.mode, self.left, self.spoiled = mode, times, 0

    def close(self) -> None:
        self._closing.set()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                self._open.append(client)
                server = None if self._target is None else socket.create_connection(self._target)
                threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
                if server is not None:
                    self._open.append(server)
                    threading.Thread(target=self._answers, args=(server, client), daemon=True).start()
                else:
                    threading.Thread(target=self._drip, args=(client,), daemon=True).start()

    def _strikes(self, *modes: str) -> str:
        """Mode that spoils what is at hand, one of ``modes``; empty: none does."""
        with self._lock:
            if self.mode not in modes:
                return ""
            mode, self.left, self.spoiled = self.mode, self.left - 1, self.spoiled + 1
            if self.left <= 0:
                self.mode = "pass"
            return mode

    def _requests(self, client: socket.socket, server: socket.socket | None) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                if self.mode == "swallow" or server is None:
                    continue
                mode = self._strikes("cut", *ERRORS)
                if mode == "cut":
                    break
                if mode:
                    body = b"<Error><Code>%s</Code></Error>" % CODES[mode]
                    head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
                    client.sendall(head % (ERRORS[mode], len(body)) + body)
                    client.shutdown(socket.SHUT_WR)
                    while client.recv(65536):  # the rest of the request: a reset would take the answer along
                        pass
                    break
                server.sendall(data)
            else:
                return
            _reset(client, server)

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if self.mode == "swallow":
                    continue
                mode = (
                    ""
                    if data.startswith(CONTINUE)
                    else self._strikes("lost-reply", "truncate", "delay", "drip")
                )
                if mode == "truncate":
                    client.sendall(data[: len(data) // 2])
                if mode in ("truncate", "lost-reply"):
                    _reset(client, server)
                    return
                if mode == "delay":
                    time.sleep(self.delay_s)
                if mode == "drip":
                    for at in range(len(data)):
                        client.sendall(data[at : at + 1])
                        if self._closing.wait(self.drip_s):
                            return
                else:
                    client.sendall(data)

    def _drip(self, client: socket.socket) -> None:
        """Send a reply of which there is always another byte to come."""
        with contextlib.suppress(OSError):
            while self.mode == "drip" and not self._closing.wait(self.drip_s):
                client.sendall(b"H")


def _reset(*connections: socket.socket) -> None:
    for each in connections:
        with contextlib.suppress(OSError):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it: only then close() counts
        each.close()


@contextlib.contextmanager
def tcp_proxy(target: tuple[str, int] | None = None, mode: str = "pass") -> Iterator[TcpProxy]:
    proxy = TcpProxy(target, mode)
    try:
        yield proxy
    finally:
        proxy.close()
