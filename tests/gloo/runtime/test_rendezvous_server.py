"""A node's rendezvous store outlives the agent that started it, and no longer than the node's folder."""

from __future__ import annotations

import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from picotron_ray.comm.rendezvous_store import read_record
from picotron_ray.errors import PicotronError
from picotron_ray.runtime.heartbeat import process_alive
from picotron_ray.runtime.node_agent import rendezvous
from picotron_ray.runtime.node_agent.rendezvous import RECORD, RendezvousServer


def ends(path: Path, record: dict[str, int]) -> bool:
    """Whether the server of a record ends within seconds."""
    deadline = time.monotonic() + 10
    while process_alive(record["pid"], record["start_ticks"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not process_alive(record["pid"], record["start_ticks"])


def test_an_agent_that_is_started_again_finds_its_store_and_another_actor_gets_its_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / RECORD
    first = RendezvousServer(tmp_path, "127.0.0.1", "actor", os.getpid())
    address = first.address()
    assert first.address() == address
    second = RendezvousServer(tmp_path, "127.0.0.1", "actor", os.getpid())
    second.start()
    assert (second.address(), second._process) == (address, None), "no other was started"

    ours = read_record(path)
    assert ours is not None
    other = RendezvousServer(tmp_path, "127.0.0.1", "another actor", os.getpid())
    other.address()
    theirs = read_record(path)
    assert theirs is not None
    assert theirs["pid"] != ours["pid"], "prefixes of another run must not meet these keys"
    assert ends(path, ours)
    first.stop()
    assert read_record(path) == theirs, "not its own any more"

    shutil.rmtree(tmp_path)
    assert ends(path, theirs)
    other.stop()
    third = RendezvousServer(tmp_path, "127.0.0.1", "actor", os.getpid())
    third.stop()  # there is none


def test_a_store_that_died_is_there_again_before_it_is_asked_for(tmp_path: Path) -> None:
    server = RendezvousServer(tmp_path, "127.0.0.1", "actor", os.getpid())
    server.address()
    first = read_record(tmp_path / RECORD)
    assert first is not None
    server.keep(0.0)
    assert read_record(tmp_path / RECORD) == first
    os.kill(first["pid"], signal.SIGKILL)
    assert ends(tmp_path / RECORD, first)
    with server._lock:
        server.keep(0.0)  # as while someone waits for an address
    assert read_record(tmp_path / RECORD) == first
    deadline = time.monotonic() + 90
    while (found := read_record(tmp_path / RECORD)) in (None, first):
        assert time.monotonic() < deadline
        server.keep(0.0)  # not once alone: the last of its threads may end a little later
        time.sleep(0.02)
    assert found is not None
    os.kill(found["pid"], signal.SIGKILL)
    assert ends(tmp_path / RECORD, found)
    server.keep(rendezvous.AGAIN_S - 1)
    assert read_record(tmp_path / RECORD) == found, "one that keeps dying is not started all the time"
    server.stop()
    server.keep(3 * rendezvous.AGAIN_S)
    assert read_record(tmp_path / RECORD) is None, "nor one whose run has ended"


def test_a_frozen_store_is_replaced_before_it_is_asked_for(tmp_path: Path) -> None:
    server, path = RendezvousServer(tmp_path, "127.0.0.1", "actor", os.getpid()), tmp_path / RECORD
    server.address()
    frozen = read_record(path)
    assert frozen is not None
    os.kill(frozen["pid"], signal.SIGSTOP)
    server.keep(100.0)
    os.utime(path, (0, 0))
    server.keep(200.0)
    assert read_record(path) == frozen, "the whole node may have stood still"
    os.utime(path)
    server.keep(200.5)  # it moves
    os.utime(path, (0, 0))
    server.keep(202.0)
    assert read_record(path) == frozen
    server.keep(202.1 + rendezvous.GRACE_S)
    assert ends(path, frozen)
    assert server.replaced == 1
    assert server.address()
    server.stop()


def test_neither_a_greeting_nor_the_end_waits_for_a_store_that_starts_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o700)
    monkeypatch.setattr(rendezvous.sys, "executable", str(slow))
    server = RendezvousServer(tmp_path, "127.0.0.1", "actor", os.getpid())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.address)
        deadline = time.monotonic() + 10
        while server._process is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process = server._process
        assert process is not None
        began = time.monotonic()
        server.start()
        server.keep(0.0)
        assert server._process is process, "one that is on its way is left to it"
        server.stop()
        with pytest.raises(PicotronError, match="the run has ended here"):
            waiting.result(timeout=5)
        assert time.monotonic() - began < 5
    assert process.poll() is not None
    server.start()
    with pytest.raises(PicotronError, match="the run has ended here"):
        server.address()
    assert server._process is None, "none is left behind by a question that came late"


def test_a_store_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.sys, "executable", "/bin/false")
    server = RendezvousServer(tmp_path, "127.0.0.1", "actor", os.getpid())
    with pytest.raises(PicotronError, match="did not start"):
        server.address()
    assert server.replaced == 1


def test_a_frozen_store_is_replaced_when_its_address_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = RendezvousServer(tmp_path, "127.0.0.1", "actor", os.getpid())
    try:
        server.address()
        frozen = read_record(tmp_path / RECORD)
        assert frozen is not None
        os.kill(frozen["pid"], signal.SIGSTOP)
        os.utime(tmp_path / RECORD, (0, 0))
        server.start()
        assert read_record(tmp_path / RECORD) == frozen, "a generation may use it"
        monkeypatch.setattr(rendezvous, "GRACE_S", 0.2)
        address = server.address()
        assert server.replaced == 1
        assert ends(tmp_path / RECORD, frozen)
        os.utime(tmp_path / RECORD, (0, 0))
        monkeypatch.setattr(rendezvous, "GRACE_S", 20.0)
        assert server.address() == address, "the node was stopped, and goes on"
    finally:
        server.stop()


def test_the_address_of_a_store_that_has_just_frozen_is_not_given_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients would try to connect to it, also after its end, until the rendezvous takes too long."""
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.2)
    server = RendezvousServer(tmp_path, "127.0.0.1", "actor", os.getpid())
    try:
        before = server.address()
        frozen = read_record(tmp_path / RECORD)
        assert frozen is not None
        os.kill(frozen["pid"], signal.SIGSTOP)
        silent_since = time.time() - 1.5
        os.utime(tmp_path / RECORD, (silent_since, silent_since))
        assert server.address() != before
    finally:
        server.stop()
