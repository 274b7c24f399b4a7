"""Debugger of one worker: debugpy, which connects outwards to a socket that the node's agent holds open.

Nothing listens in a worker, so that nobody reaches its debugger but by calls to the agent. While it is
attached the flag ``DEBUGGED`` tells all ranks that one of them may stand still for ``LIMIT_S``.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from typing import Any

import psutil

from picotron_ray.errors import ConfigError

log = logging.getLogger(__name__)
LIMIT_S = 270.0
"""Of any phase while a debugger is attached; operations of process groups end after 300 s."""
AGREE_S = 600.0
"""For the step at hand to end: before, other ranks would take a rank that stands still for a hang."""
CONNECT_S = 30.0
LOOK_S, POLL_S = 1.0, 0.02


class Debugger:
    """The debugger of one worker. Orders come on threads of their own.

    Args:
        allowed: whether the config has ``debug.attach``.
    """

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._lock = threading.Lock()
        self._agreed = threading.Event()
        self.attached = False
        """Whether one is attached, or about to be."""

    def heard(self) -> None:
        """Hear that all ranks know of it."""
        self._agreed.set()

    def attach(self, port: int) -> dict[str, Any]:
        """Connect to a loopback port of this node; returns once that is done.

        Raises:
            ConfigError: the config or the node has no debugger, one is attached, or no step ends.
        """
        if not self._allowed:
            raise ConfigError(
                "attach: debug.attach is off, since a debugger can run any code in the run; `stop` the run,"
                " and launch it again with debug.attach=true"
            )
        debugpy = _debugpy()
        with self._lock:
            if self.attached:
                raise ConfigError("attach: a debugger is attached to this rank already; end that one first")
            self._agreed.clear()
            self.attached = True
        try:
            if not self._agreed.wait(AGREE_S):
                raise ConfigError(
                    f"attach: no step has ended for {AGREE_S:g} s; ask again when the run trains"
                )
            connect = self._connect(debugpy, port)
        except ConfigError:
            self.attached = False
            raise
        log.warning("a debugger is attached to this rank")
        watch = threading.Thread(target=self._watch, args=(port, connect), name="debugger-watch", daemon=True)
        watch.start()
        return {"attached": True}

    @staticmethod
    def _connect(debugpy: Any, port: int) -> threading.Thread:
        """Have debugpy connect; it returns only once an IDE is there, so that it has a thread of its own."""
        problems: list[BaseException] = []

        def connect() -> None:
            try:
                debugpy.configure(subProcess=False)
                debugpy.connect(("127.0.0.1", port))
            except (Exception, SystemExit) as error:  # noqa: BLE001 (none may end the run)
                problems.append(error)

        thread = threading.Thread(target=connect, name="debugger-connect", daemon=True)
        thread.start()
        deadline = time.monotonic() + CONNECT_S
        while not _connected(port):
            if problems or time.monotonic() > deadline:
                why = repr(problems[0]) if problems else f"it has not for {CONNECT_S:g} s"
                raise ConfigError(f"attach: debugpy did not connect: {why}")
            time.sleep(POLL_S)
        return thread

    def _watch(self, port: int, connect: threading.Thread) -> None:
        """See the end of the connection, also where the agent dies; debugpy lets all threads go on then.

        Where no IDE ever came, its ``connect`` waits for one for ever, and would let no other connect.
        """
        pydevd, debugger = sys.modules["pydevd"], None
        while _connected(port):
            debugger = pydevd.get_global_debugger() or debugger
            time.sleep(LOOK_S)
        deadline = time.monotonic() + CONNECT_S
        while pydevd.get_global_debugger() is not None and time.monotonic() < deadline:
            time.sleep(POLL_S)  # it clears up
        if debugger is not None:
            debugger.ready_to_run = True
        connect.join(CONNECT_S)
        self.attached = False
        log.warning("no debugger is attached to this rank any more")


def _connected(port: int) -> bool:
    return any(
        each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED
        for each in psutil.Process().net_connections("tcp4")
    )


def _debugpy() -> Any:
    # It warns on stderr of Python's frozen modules, which no breakpoint of a run is in.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    try:
        import debugpy  # noqa: T100 (it is what the command is for)
    except ImportError as error:
        raise ConfigError(
            f"attach: debugpy is not installed on this rank's node ({sys.executable}); install the extra"
            " `debug` there"
        ) from error
    return debugpy
