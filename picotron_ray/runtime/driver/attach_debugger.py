"""``debug NAME attach``: an IDE's debugger on one rank of a run, through the calls of its node's agent.

debugpy's adapter runs here, beside the IDE. What it says to the worker's debugger, and hears from it, travels
in calls of Ray, which need its token; nothing listens where the worker is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psutil

from picotron_ray.errors import ConfigError, install_extra
from picotron_ray.runtime.driver.follow_run import LostRunError
from picotron_ray.runtime.driver.tool_orders import RunTools

HOST = "127.0.0.1"
MOST_PORT = 65_535
MOST_STOP_S = 240.0
"""Operations that other ranks wait in end after 300 s."""
ADAPTER_S = 30.0
WAIT_S = 2.0
READ_BYTES, MOST_SAID = 1 << 16, 4096
ADAPTER = "debugpy.adapter"
Say = Callable[[str], None]


class Adapter(NamedTuple):
    """debugpy's adapter: port for the IDE, and port for the debugger."""

    client: int
    server: int


def attach(run: str, rank: str, port: int, stop_s: float, say: Say, told: Callable[[int], None]) -> str:
    """Serve an IDE, which may detach and come again, until the rank's debugger is gone; returns why it is.

    Args:
        port: for the IDE, on loopback of this machine; 0: any.
        stop_s: seconds that the rank may stand still.
        told: hears the port once an IDE may connect.

    Raises:
        ConfigError: debugpy is missing, the port is taken, or the run, the rank or the config does not allow
            it; nothing has happened then.
        LostRunError: the agent of the rank's node does not answer.
    """
    if importlib.util.find_spec("debugpy") is None:
        raise ConfigError(f"attach: debugpy is not installed here; {install_extra('debug')}")
    if not 0 < stop_s <= MOST_STOP_S:
        raise ConfigError(f"--timeout-s: saw {stop_s:g}, expected above 0 and at most {MOST_STOP_S:g}")
    check_port(port)
    tools = RunTools(run)
    chosen = tools.one_rank(rank, "--rank")
    with ended_in_order(), adapter_on(port) as adapter:
        link = RankLink(tools, chosen, stop_s)
        try:
            why = link.connect(lambda: say(f"rank {chosen}: its debugger connects at the end of a step"))
            if why:
                raise ConfigError(f"rank {chosen}: {why.removeprefix('attach: ')}")
            told(adapter.client)
            return link.relay(adapter.server)
        finally:
            link.detach()


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the adapter and let the rank go on, as an interrupt does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_port(port: int) -> None:
    """Refuse a port that cannot be had.

    Raises:
        ConfigError: it is taken, or is none.
    """
    if not 0 <= port <= MOST_PORT:
        raise ConfigError(f"--port: saw {port}, expected from 0, any that is free, to {MOST_PORT}")
    try:
        with socket.create_server((HOST, port)):
            return
    except OSError as error:
        raise ConfigError(
            f"--port: saw {port}, which cannot be had ({error.strerror}); take another, or 0"
        ) from error


@contextmanager
def adapter_on(port: int) -> Iterator[Adapter]:
    """Run debugpy's adapter, which leaves the process that starts it.

    Raises:
        ConfigError: it does not start.
    """
    with socket.create_server((HOST, 0)) as listener:
        listener.settimeout(ADAPTER_S)
        own = str(listener.getsockname()[1])
        command = [
            sys.executable,
            "-m",
            "debugpy.adapter",
            "--host",
            HOST,
            "--port",
            str(port),
            "--for-server",
        ]
        began = subprocess.run([*command, own], stdin=subprocess.DEVNULL, check=False)
        try:
            ends = _told_by_adapter(listener)
        except (OSError, ValueError) as error:
            raise ConfigError(f"attach: debugpy's adapter did not start (exit {began.returncode})") from error
    if "error" in ends:
        raise ConfigError(f"attach: debugpy's adapter did not start: {ends['error']}")
    adapter = Adapter(ends["client"]["port"], ends["server"]["port"])
    process = _listener_at(adapter.client)  # it has left the one that was started
    try:
        yield adapter
    finally:
        if process is not None:
            with suppress(psutil.Error):
                process.terminate()


def _told_by_adapter(listener: socket.socket) -> dict[str, Any]:
    """Return what our adapter says of its ports. Others that connect have no process of ours at theirs.

    Raises:
        OSError, ValueError: it says nothing.
    """
    deadline = time.monotonic() + ADAPTER_S
    while time.monotonic() < deadline:
        with listener.accept()[0] as said:
            said.settimeout(ADAPTER_S)
            found: dict[str, Any] = json.loads(said.makefile().read(MOST_SAID))
        if "error" in found or all(_is_ours(found[end]["port"]) for end in ("client", "server")):
            return found
    raise TimeoutError(f"nothing was heard of it for {ADAPTER_S:g} s")


def _is_ours(port: int) -> bool:
    """Whether an adapter which this user runs listens at a port."""
    process = _listener_at(port)
    with suppress(psutil.Error):
        return process is not None and process.uids().real == os.getuid() and ADAPTER in process.cmdline()
    return False


def _listener_at(port: int) -> psutil.Process | None:
    found = (each for each in psutil.net_connections("tcp4") if each.status == psutil.CONN_LISTEN)
    pid = next((each.pid for each in found if each.laddr.port == port), None)
    with suppress(psutil.Error):
        return None if pid is None else psutil.Process(pid)
    return None


class RankLink:
    """Link to the debugger of one rank, which its agent holds."""

    def __init__(self, tools: RunTools, rank: int, stop_s: float) -> None:
        """Have the rank's debugger connect to its agent.

        Raises:
            ConfigError: the agent refuses.
            LostRunError: it does not answer.
        """
        self._tools, self._rank = tools, rank
        answer = self._call("debugger_attach", *tools.identity, tools.spec.members[rank].worker, stop_s)
        if "refused" in answer:
            raise ConfigError(f"rank {rank}: {answer['refused']}")
        self._key: str = answer["link"]

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._tools.at_rank(self._rank, method, *arguments)

    def _receive(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._call("debugger_receive", self._key, WAIT_S)
        return found

    def connect(self, waits: Callable[[], None]) -> str:
        """Wait until the debugger has connected; returns why it does not, else nothing.

        Args:
            waits: is called once where that takes a while.
        """
        told = False
        while True:
            answer = self._receive()
            self._first: bytes = answer["data"]
            if answer["connected"] or answer["over"]:
                return "" if answer["connected"] else str(answer["over"])
            if not told:
                waits()
            told = True

    def relay(self, port: int) -> str:
        """Carry bytes between the debugger and the adapter's port; returns why that is over."""
        over = list[str]()
        with socket.create_connection((HOST, port)) as adapter:
            adapter.sendall(self._first)
            sender = threading.Thread(target=self._send, args=(adapter, over), daemon=True)
            sender.start()
            while not over:
                answer = self._receive()
                with suppress(OSError):  # the adapter is gone: the other thread sees it
                    adapter.sendall(answer["data"])
                if answer["over"]:
                    over.append(answer["over"])
            with suppress(OSError):
                adapter.shutdown(socket.SHUT_RDWR)
            sender.join(WAIT_S)
        return over[0]

    def _send(self, adapter: socket.socket, over: list[str]) -> None:
        try:
            while data := adapter.recv(READ_BYTES):
                if not self._call("debugger_send", self._key, data):
                    return  # the reason is on its way
            over.append("debugpy's adapter has ended")
        except OSError:
            over.append("debugpy's adapter has ended")
        except LostRunError as error:
            over.append(str(error))

    def detach(self) -> None:
        """Let the rank go on."""
        with suppress(LostRunError):
            self._call("debugger_detach", self._key)
