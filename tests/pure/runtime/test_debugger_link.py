"""The link to a worker's debugger: whose connection it takes, and when it lets the worker go on by itself."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import attach_debugger
from picotron_ray.runtime.node_agent import debugger_calls, debugger_link
from picotron_ray.runtime.node_agent.debugger_calls import DebuggerCalls
from picotron_ray.runtime.node_agent.debugger_link import DebuggerLink

WORKER = """
import socket, sys
one = socket.create_connection(("127.0.0.1", int(sys.stdin.readline())))
one.sendall(b"hello")
print(one.recv(100).decode(), flush=True)
one.recv(100)
print("closed", flush=True)
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WORKER], stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugger_link, "LOOK_S", 0.05)


def page(pid: int, since_s: float = 1e12, phase: str = "sync", **more: Any) -> Any:
    values = {"pid": pid, "phase_since_s": since_s, "phase": phase, "step": 3, "step_time_s": 0.1}
    return SimpleNamespace(**{**values, "term": 1, "n": 1, **more})


def link_of(pages: Any, stop_s: float = 60.0) -> DebuggerLink:
    return DebuggerLink("w1-1", (1, 1), pages, stop_s)


def start(link: DebuggerLink, worker: subprocess.Popen[str]) -> None:
    assert worker.stdin is not None
    worker.stdin.write(f"{link.port}\n")
    worker.stdin.flush()


def received(link: DebuggerLink) -> bytes:
    deadline, data = time.monotonic() + 20, b""
    while not data and not link.over and time.monotonic() < deadline:
        data = link.receive(0.2)
    return data


def test_a_link_takes_its_workers_connection_alone(worker: subprocess.Popen[str]) -> None:
    link = link_of(lambda: page(worker.pid))
    with socket.create_connection(("127.0.0.1", link.port)) as other:
        other.settimeout(20)
        assert other.recv(1) == b"", "a process of another kind is shut out"
    assert not link.connected
    start(link, worker)
    assert received(link) == b"hello"
    assert link.send(b"and back")
    assert worker.stdout is not None
    assert worker.stdout.readline() == "and back\n"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", link.port))
    link.close("it was detached")
    assert worker.stdout.readline() == "closed\n", "debugpy lets the worker go on then"
    assert (link.send(b"more"), link.over) == (False, "it was detached")


@pytest.mark.usefixtures("quick")
def test_a_rank_that_nobody_looks_at_goes_on(
    worker: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debugger_link, "SILENT_S", 1.0)
    link = link_of(lambda: page(worker.pid))
    start(link, worker)
    assert received(link) == b"hello"
    assert link.send(b"stay")
    time.sleep(2.0)
    assert link.over == "nobody has asked for it any more"


@pytest.mark.usefixtures("quick")
def test_a_rank_that_stands_still_too_long_goes_on(worker: subprocess.Popen[str]) -> None:
    began = time.monotonic()
    link = link_of(lambda: page(worker.pid, began), 1.0)
    start(link, worker)
    assert received(link) == b"hello"
    while not link.over and time.monotonic() < began + 20:
        link.receive(0.1)
    assert link.over == "its rank has stood still for 1 s in phase sync"
    assert time.monotonic() - began >= 1.0


@pytest.mark.usefixtures("quick")
def test_many_short_stops_of_one_step_are_one_long_one(worker: subprocess.Popen[str]) -> None:
    """Other ranks wait in one operation for the sum of them."""
    link = link_of(lambda: page(worker.pid, time.monotonic(), "forward"), 1.0)
    start(link, worker)
    began = time.monotonic()
    while not link.over and time.monotonic() < began + 20:
        link.receive(0.1)
    assert link.over == "a step of its rank has taken 1 s longer than the one before"


@pytest.mark.usefixtures("quick")
def test_a_hold_of_all_ranks_is_no_long_step(worker: subprocess.Popen[str]) -> None:
    link = link_of(lambda: page(worker.pid, time.monotonic(), "hold"), 0.5)
    start(link, worker)
    time.sleep(2.0)
    assert not link.over
    link.close("")


@pytest.mark.usefixtures("quick")
def test_a_link_ends_with_its_generation(worker: subprocess.Popen[str]) -> None:
    link = link_of(lambda: page(worker.pid, n=2))
    received(link)
    assert link.over == "generation 1.1 of its rank has ended"


@pytest.mark.usefixtures("quick")
def test_a_page_that_cannot_be_read_for_a_while_ends_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debugger_link, "SILENT_S", 0.5)
    answers: list[Any] = [OSError(24, "too many open files"), page(1)]

    def pages() -> Any:
        found = answers[0] if len(answers) == 1 else answers.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    link = link_of(pages)
    time.sleep(1.5)
    assert link.over == "nobody has asked for it any more"


def test_a_link_that_is_closed_while_it_takes_a_connection_keeps_none(
    worker: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    plain = debugger_link._connects

    def slow(*arguments: Any) -> bool:
        entered.set()
        go_on.wait(20)
        return plain(*arguments)

    monkeypatch.setattr(debugger_link, "_connects", slow)
    link = link_of(lambda: page(worker.pid))
    start(link, worker)
    assert entered.wait(20)
    link.close("it was detached")
    go_on.set()
    assert worker.wait(20) is not None, "its connection is over"


@pytest.mark.usefixtures("quick")
def test_a_link_ends_with_its_worker() -> None:
    link = link_of(lambda: None)
    assert received(link) == b""
    assert link.over == "worker w1-1 has ended"


def test_a_node_has_so_many_links_and_forgets_none_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DebuggerCalls, "_links", {str(at): SimpleNamespace(over="") for at in range(4)})
    calls = DebuggerCalls()
    assert (
        "4 debuggers are attached on this node" in calls.debugger_attach(1, (1, 1), "w1-1", 60.0)["refused"]
    )
    DebuggerCalls._links["2"].over = "it was detached"
    ended: Any = ValueError("no such actor")

    def missing(worker: str) -> Any:
        raise ended

    calls._worker = missing  # type: ignore[method-assign]
    assert calls.debugger_attach(1, (1, 1), "w1-1", 60.0) == {"refused": "worker w1-1 has ended"}
    assert sorted(DebuggerCalls._links) == ["0", "1", "3"]
    assert calls.debugger_receive("2", 0.0)["over"] == "the agent of its node knows nothing of it"
    assert calls.debugger_send("2", b"") is False
    assert debugger_calls.MOST_LINKS == 4


@pytest.mark.parametrize("port", [-1, 70_000])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"^--port: saw {port}, expected from 0"):
        attach_debugger.check_port(port)


def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^--port: saw {port}, which cannot be had \(.*in use"):
            attach_debugger.check_port(port)


@pytest.mark.parametrize("stop_s", [0.0, -1.0, 241.0])
def test_a_stop_ends_before_the_operations_of_other_ranks(stop_s: float) -> None:
    with pytest.raises(ConfigError, match=r"^--timeout-s: saw .*, expected above 0 and at most 240$"):
        attach_debugger.attach("night", "0", 0, stop_s, print, print)


def test_the_adapter_ends_with_what_it_is_for() -> None:
    with attach_debugger.adapter_on(0) as adapter, socket.create_connection(("127.0.0.1", adapter.client)):
        pass
    deadline = time.monotonic() + 20
    while attach_debugger._listener_at(adapter.client) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
