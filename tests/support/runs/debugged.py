"""A thread that trains nothing, an IDE attaches to it twice: prints whether it is traced then, and later."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from picotron_ray.runtime.driver.attach_debugger import adapter_on
from picotron_ray.runtime.worker.tools.debugger import Debugger
from tests.support.runs.dap import Ide

DEADLINE_S = 30.0


class Training(threading.Thread):
    """Boundaries, a hundred a second."""

    def __init__(self, debugger: Debugger) -> None:
        super().__init__(daemon=True)
        self.debugger, self.trace = debugger, None

    def run(self) -> None:
        while True:
            self.debugger.heard()
            self.debugger.clear()
            self.trace: Any = sys.gettrace()
            time.sleep(0.01)


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def look(training: Training) -> None:
    with adapter_on(0) as adapter, socket.create_server(("127.0.0.1", 0)) as agent:
        taken: list[socket.socket] = []

        def relay() -> None:
            taken.append(agent.accept()[0])
            server = socket.create_connection(("127.0.0.1", adapter.server))
            threading.Thread(target=pump, args=(taken[0], server), daemon=True).start()
            pump(server, taken[0])

        threading.Thread(target=relay, daemon=True).start()
        training.debugger.attach(agent.getsockname()[1], os.getpid(), lambda: None)
        ide = Ide(adapter.client)
        ide.attach()
        until(lambda: training.trace is not None)
        print("traced", flush=True)
        ide.leave()
        taken[0].shutdown(socket.SHUT_RDWR)
        until(lambda: not training.debugger.attached and training.trace is None)
        print("untraced", flush=True)


if __name__ == "__main__":
    one = Training(Debugger(True))
    one.start()
    look(one)
    look(one)
