"""TCP proxy that passes bytes on, swallows them, or answers so slowly that no socket's timeout notices."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

DRIP_S = 0.1


class TcpProxy:
    """Listener before ``target``; without one it only swallows. ``mode``: pass, swallow or drip."""

    def __init__(self, target: tuple[str, int] | None = None, mode: str = "pass") -> None:
        self.mode, self._target = mode, target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self._closing = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

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
                threading.Thread(target=self._carry, args=(client, server), daemon=True).start()
                if server is not None:
                    self._open.append(server)
                    threading.Thread(target=self._carry, args=(server, client), daemon=True).start()
                else:
                    threading.Thread(target=self._drip, args=(client,), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if sink is not None and self.mode == "pass":
                    sink.sendall(data)

    def _drip(self, client: socket.socket) -> None:
        """Send a reply of which there is always another byte to come."""
        with contextlib.suppress(OSError):
            while self.mode == "drip" and not self._closing.wait(DRIP_S):
                client.sendall(b"H")


@contextlib.contextmanager
def tcp_proxy(target: tuple[str, int] | None = None, mode: str = "pass") -> Iterator[TcpProxy]:
    proxy = TcpProxy(target, mode)
    try:
        yield proxy
    finally:
        proxy.close()
