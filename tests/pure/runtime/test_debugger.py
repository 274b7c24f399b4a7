"""A worker's debugger: to whom it connects, what ends it, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import attach_debugger
from picotron_ray.runtime.worker.tools import debugger as module
from picotron_ray.runtime.worker.tools.debugger import Debugger

SERVED = """
import sys, time
from picotron_ray.runtime.driver.attach_debugger import adapter_on, ended_in_order
try:
    with ended_in_order(), adapter_on(0) as adapter:
        print(adapter.client, flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    sys.exit(7)
"""


def nothing() -> None:
    return None


@pytest.fixture
def agent() -> Iterator[socket.socket]:
    with socket.create_server((module.HOST, 0)) as listener:
        yield listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def test_a_peer_elsewhere_with_the_same_port_is_no_debugger(agent: socket.socket) -> None:
    port = port_of(agent)
    with socket.create_server(("127.0.0.2", port)), socket.create_connection(("127.0.0.2", port)):
        assert module._connections(port) == []
        with socket.create_connection((module.HOST, port)):
            assert len(module._connections(port)) == 1


@pytest.mark.parametrize("error", [AttributeError("net_connections"), OSError(24, "too many"), SystemExit(1)])
def test_no_error_leaves_a_rank_attached(
    agent: socket.socket, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(debugpy: Any, port: int) -> Any:
        raise error

    monkeypatch.setattr(Debugger, "_connect", staticmethod(broken))
    told: list[bool] = []
    one = Debugger(True, told.append)
    with pytest.raises(type(error)):
        one.attach(port_of(agent), os.getpid(), one.heard)
    assert not one.attached
    assert told == []


def test_an_order_ends_with_the_agents_listener(agent: socket.socket) -> None:
    """The step at hand may take minutes; whoever has the port then is somebody else."""
    one = Debugger(True)
    threading.Timer(0.5, agent.close).start()
    with pytest.raises(ConfigError, match=r"^attach: it was taken back$"):
        one.attach(port_of(agent), os.getpid(), nothing)
    assert not one.attached


def test_only_one_that_is_connected_is_told_and_so_is_its_end(
    agent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that hung while one was only asked for was taken for stopped by it."""
    told: list[bool] = []
    one = Debugger(True, told.append)
    ours: list[socket.socket] = []

    def connect(debugpy: Any, port: int) -> threading.Thread:
        assert told == [], "all ranks know of it, and it is not there yet"
        ours.append(socket.create_connection((module.HOST, port)))
        thread = threading.Thread(target=lambda: None)
        thread.start()
        return thread

    monkeypatch.setattr(Debugger, "_connect", staticmethod(connect))
    monkeypatch.setitem(sys.modules, "pydevd", SimpleNamespace(get_global_debugger=lambda: None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_debugpy", lambda: None)
        taken = threading.Thread(target=lambda: ours.append(agent.accept()[0]))
        taken.start()
        one.attach(port_of(agent), os.getpid(), one.heard)
    taken.join()
    assert told == [True]
    for each in ours:
        each.close()
    deadline = time.monotonic() + 20
    while one.attached or told != [True, False]:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_another_process_took_is_cut(agent: socket.socket) -> None:
    with socket.create_connection((module.HOST, port_of(agent))) as ours, agent.accept()[0] as theirs:
        with pytest.raises(ConfigError, match="another process than the agent has port"):
            module._check_peer(port_of(agent), os.getppid())
        theirs.settimeout(10)
        assert theirs.recv(1) == b""
        assert ours.fileno() >= 0


def test_a_debugger_that_is_gone_traces_nothing_and_lets_another_come() -> None:
    """In a process of its own: debugpy changes the interpreter that it is imported into."""
    script = Path(__file__).parents[2] / "support" / "runs" / "debugged.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=90, cwd=script.parents[3]
    )
    assert done.stdout.split() == ["traced", "untraced", "traced", "untraced"], done.stderr


def test_a_process_that_is_no_adapter_of_ours_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = subprocess.run

    def after_a_stranger(command: list[str], **more: Any) -> Any:
        with socket.create_connection((attach_debugger.HOST, int(command[-1]))) as stranger:
            stranger.sendall(b'{"client": {"port": 1}, "server": {"port": 2}}')
        return plain(command, **more)

    monkeypatch.setattr(attach_debugger.subprocess, "run", after_a_stranger)
    with attach_debugger.adapter_on(0) as adapter:
        assert adapter.client > 2
        assert adapter.server > 2


def test_sigterm_ends_the_adapter_too() -> None:
    with subprocess.Popen([sys.executable, "-c", SERVED], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert attach_debugger._is_ours(port)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 7
    deadline = time.monotonic() + 20
    while attach_debugger._listener_at(port) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
