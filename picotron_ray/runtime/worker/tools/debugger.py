"""Debugger of one worker: debugpy, which connects outwards to a socket that the node's agent holds open.

Nothing listens in a worker, so that nobody reaches its debugger but by calls to the agent. While it is
attached the flag ``DEBUGGED`` tells all ranks that one of them may stand still for ``LIMIT_S``.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from picotron_ray.errors import ConfigError, install_extra

log = logging.getLogger(__name__)
HOST = "127.0.0.1"
LIMIT_S = 270.0
"""Of any phase while a debugger is attached; operations of process groups end after 300 s."""
AGREE_S = 600.0
"""For the step at hand to end: before, other ranks would take a rank that stands still for a hang."""
CONNECT_S = 30.0
TAKEN_S = 1.0
"""For the agent to take the connection, at whose port it listened just before."""
LOOK_S, POLL_S = 1.0, 0.02


class Debugger:
    """The debugger of one worker. Orders come on threads of their own.

    Args:
        allowed: whether the config has ``debug.attach``.
        tell: hears, on any thread, that one is connected from now on, or none any more. One that was only
            asked for stops nothing: a rank that hangs before must not be taken for one that it stops.
    """

    def __init__(self, allowed: bool, tell: Callable[[bool], None] = lambda _: None) -> None:
        self._allowed, self._tell = allowed, tell
        self._lock = threading.Lock()
        self._agreed = threading.Event()
        self.attached = False
        """Whether one is attached, or about to be."""
        self.traced = False
        """Whether the thread that trains may be traced by one."""

    def heard(self) -> None:
        """Hear that all ranks know of it."""
        self._agreed.set()

    def attach(self, port: int, agent: int, tell_all: Callable[[], None]) -> dict[str, Any]:
        """Connect to a loopback port of this node, at which the agent listens; returns once that is done.

        Args:
            agent: its process: nobody else's port is connected to.
            tell_all: has all ranks know with the next exchange.

        Raises:
            ConfigError: the config or the node has no debugger, one is attached, no step ends, or the agent
                does not listen any more.
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
            self.attached = self.traced = True
        try:
            tell_all()
            self._await_agreement(port, agent)
            connect = self._connect(debugpy, port)
            self._tell(True)
        except BaseException:
            self.attached = False
            raise
        watch = threading.Thread(target=self._watch, args=(port, connect), name="debugger-watch", daemon=True)
        watch.start()  # from now on it is what says that none is attached any more
        _check_peer(port, agent)
        log.warning("a debugger is attached to this rank")
        return {"attached": True}

    def _await_agreement(self, port: int, agent: int) -> None:
        """Wait until all ranks know of it, as long as the agent listens."""
        deadline = time.monotonic() + AGREE_S
        while not self._agreed.wait(LOOK_S):
            if not _holds(agent, port, psutil.CONN_LISTEN):
                raise ConfigError("attach: it was taken back")
            if time.monotonic() > deadline:
                raise ConfigError(f"attach: no step has ended for {AGREE_S:g} s; ask again when it trains")
        if not _holds(agent, port, psutil.CONN_LISTEN):
            raise ConfigError("attach: it was taken back")

    @staticmethod
    def _connect(debugpy: Any, port: int) -> threading.Thread:
        """Have debugpy connect; it returns only once an IDE is there, so that it has a thread of its own."""
        problems: list[BaseException] = []

        def connect() -> None:
            try:
                debugpy.configure(subProcess=False)
                debugpy.connect((HOST, port))
            except (Exception, SystemExit) as error:  # noqa: BLE001 (none may end the run)
                problems.append(error)

        thread = threading.Thread(target=connect, name="debugger-connect", daemon=True)
        thread.start()
        deadline = time.monotonic() + CONNECT_S
        while not _connections(port):
            if problems or time.monotonic() > deadline:
                why = repr(problems[0]) if problems else f"it has not for {CONNECT_S:g} s"
                raise ConfigError(f"attach: debugpy did not connect: {why}")
            time.sleep(POLL_S)
        return thread

    def _watch(self, port: int, connect: threading.Thread) -> None:
        """See the end of the connection, also where the agent dies; debugpy lets all threads go on then.

        Where no IDE ever came, its ``connect`` waits for one for ever, and would let no other connect.
        """
        try:
            pydevd, debugger = sys.modules["pydevd"], None
            while _connections(port):
                debugger = pydevd.get_global_debugger() or debugger
                time.sleep(LOOK_S)
            deadline = time.monotonic() + CONNECT_S
            while pydevd.get_global_debugger() is not None and time.monotonic() < deadline:
                time.sleep(POLL_S)  # it clears up
            if debugger is not None:
                debugger.ready_to_run = True
            connect.join(CONNECT_S)
        finally:
            self.attached = False
            self._tell(False)
        log.warning("no debugger is attached to this rank any more")

    def clear(self) -> None:
        """Trace no more, once it is gone: called at a boundary by the thread that trains.

        debugpy leaves its trace function on that thread, where each call would go through it.
        """
        if self.traced and not self.attached:
            self.traced = False
            if tracing := sys.modules.get("pydevd_tracing"):
                tracing.restore_sys_set_trace_func()  # its own warns, and does nothing
                sys.settrace(None)


def _connections(port: int) -> list[Any]:
    """Connections of this process to a port of this node."""
    return [
        each
        for each in _seen_connections(os.getpid())
        if each.raddr and tuple(each.raddr) == (HOST, port) and each.status == psutil.CONN_ESTABLISHED
    ]


def _holds(pid: int, port: int, status: str) -> bool:
    """Whether a process has a loopback port of its own in a state."""
    return any(tuple(each.laddr) == (HOST, port) and each.status == status for each in _seen_connections(pid))


def _seen_connections(pid: int) -> list[Any]:
    while True:
        try:
            return list(psutil.Process(pid).net_connections("tcp4"))
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # another user's is nobody of ours
            return []
        except (OSError, psutil.Error) as error:  # out of files, for a while
            log.warning("connections of process %d cannot be seen: %s", pid, error)
            time.sleep(LOOK_S)


def _check_peer(port: int, agent: int) -> None:
    """See that it is the agent that took the connection; else cut it.

    Raises:
        ConfigError: it is not.
    """
    deadline = time.monotonic() + TAKEN_S
    while not _holds(agent, port, psutil.CONN_ESTABLISHED):
        if time.monotonic() > deadline:
            _cut(port)
            raise ConfigError(f"attach: another process than the agent has port {port}; ask again")
        time.sleep(POLL_S)


def _cut(port: int) -> None:
    for each in _connections(port):
        with socket.socket(fileno=os.dup(each.fd)) as one, suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _debugpy() -> Any:
    # It warns on stderr of Python's frozen modules, which no breakpoint of a run is in.
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    try:
        import debugpy  # noqa: T100 (it is what the command is for)
    except ImportError as error:
        raise ConfigError(
            f"attach: debugpy is not installed on this rank's node ({sys.executable});"
            f" {install_extra('debug')} there"
        ) from error
    return debugpy
