"""The process groups of a generation of one rank, in this process: what they know, and what an abort does."""

from __future__ import annotations

import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from picotron_ray.comm import abortable_wait, process_groups
from picotron_ray.comm.process_groups import LOST_PEER_TEXTS, ProcessGroups, meet_poll_s
from picotron_ray.comm.sockets import SocketInfo, tcp_sockets
from picotron_ray.errors import PeerLostError


@pytest.fixture(scope="module")
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))


@pytest.fixture
def alone(store: TCPStore, request: pytest.FixtureRequest) -> Iterator[ProcessGroups]:
    """Not connected yet."""
    groups = ProcessGroups("127.0.0.1", store.port, request.node.nodeid, 0, 1, timeout_s=20, rendezvous_s=5)
    yield groups
    groups.close()
    assert not dist.is_initialized()


def info(inode: str, port: int, peer: int | None = None) -> SocketInfo:
    there = None if peer is None else ("10.0.0.9", peer)
    return SocketInfo(3, inode, False, ("10.0.0.1", port), there)


def test_what_a_generation_knows_of_itself(alone: ProcessGroups, store: TCPStore) -> None:
    hook = sys.excepthook
    before = {found.inode for found in tcp_sockets()}
    alone.connect()
    assert alone._rounds == 1
    assert alone._initialised
    assert store.port not in {port for _, port in alone._known}, "it was there before"
    assert not alone._forming
    assert len(alone._store_inodes) == 1
    assert not alone._store_inodes & before
    assert alone._known == alone._listening != set()
    assert all(found.listening for found in tcp_sockets() if found.local in alone._listening)
    assert alone.timeout.total_seconds() == 20
    assert store.get(f"{alone._prefix}/all-arrived") == b"1"
    assert alone.all_gather(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T).tolist() == [[[1.0, 3.0], [2.0, 4.0]]]
    first = alone._known
    with alone.forming():
        assert alone._forming
        dist.new_group([0])
    assert not alone._forming
    assert alone._rounds == 2
    assert alone._known == alone._listening >= first
    assert not alone.aborted
    assert not alone.given_up
    alone.close()
    assert not alone.given_up
    assert sys.excepthook is hook
    assert alone._watch is None
    assert abortable_wait._watch is None
    assert not alone._initialised


def test_ranks_do_not_read_each_other_in_the_store(
    alone: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would be the square of their number."""
    keys: list[str] = []
    plain = dist.PrefixStore.get

    def get(store: Any, key: str) -> bytes:
        keys.append(key)
        return plain(store, key)

    monkeypatch.setattr(dist.PrefixStore, "multi_get", None)
    monkeypatch.setattr(dist.PrefixStore, "get", get)
    alone.connect()
    with alone.forming():
        dist.new_group([0])
    assert not [key for key in keys if "listening" in key]
    assert len(alone.nodes) == 1
    alone.close()


def test_each_step_of_the_rendezvous_hears_of_an_abort(alone: ProcessGroups) -> None:
    alone._aborted.set()
    with pytest.raises(PeerLostError):
        alone._connect_store()
    with pytest.raises(PeerLostError):
        alone._meet()


def test_opening_is_connecting(store: TCPStore) -> None:
    groups = ProcessGroups.open("127.0.0.1", store.port, "opened", 0, 1)
    assert dist.get_world_size() == 1
    groups.close()


def test_sockets_of_a_generation(alone: ProcessGroups) -> None:
    alone._before, alone._store_inodes, alone._known = {"old"}, {"store"}, {("10.0.0.1", 1), ("10.0.0.9", 2)}
    assert alone._is_ours(info("store", 9))
    assert alone._is_ours(info("new", 1))
    assert alone._is_ours(info("new", 9, 2))
    assert not alone._is_ours(info("new", 9, 9)), "another thread's"
    assert not alone._is_ours(info("old", 1, 2))
    alone._forming = True
    assert alone._is_ours(info("new", 9, 9))
    assert not alone._is_ours(info("old", 1, 2))


def test_the_store_alone_is_told_by_its_port(alone: ProcessGroups, store: TCPStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        alone._before = {found.inode for found in tcp_sockets()}
        with socket.create_connection(server.getsockname()):
            alone._connect_store()
    assert len(alone._store_inodes) == 1


@pytest.mark.parametrize("forming", [False, True])
def test_an_abort_shuts_what_is_there(
    alone: ProcessGroups, monkeypatch: pytest.MonkeyPatch, forming: bool
) -> None:
    shut: list[str] = []
    again = threading.Event()

    def counted(wanted: object) -> int:
        shut.append(threading.current_thread().name)
        if len(shut) > 3:
            again.set()
        return 0

    monkeypatch.setattr(process_groups, "shut_connections", counted)
    alone._forming = forming
    assert alone.abort() is True
    assert alone.aborted
    if forming:
        assert again.wait(5)
        (sweep,) = (thread for thread in threading.enumerate() if thread.name == "abort-sweep")
        assert sweep.daemon
        alone._forming = False
        sweep.join(5)
        assert not sweep.is_alive()
        assert set(shut[1:]) == {"abort-sweep"}
    else:
        assert shut == [threading.current_thread().name]
        shut.clear()
        alone.close()
        assert len(shut) == 1, "what was opened meanwhile"


def test_a_sweep_ends_where_nobody_comes_out(alone: ProcessGroups, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks whenever its clock has gone on, until the time of the rendezvous is over."""
    clock, shut = [100.0], list[float]()

    def sleep(seconds: float) -> None:
        assert seconds == process_groups.SWEEP_S
        clock.append(clock[-1] + 2)

    def look(wanted: object) -> None:
        shut.append(clock[-1])
        assert len(shut) < 9, "for ever"

    monkeypatch.setattr(process_groups, "time", SimpleNamespace(monotonic=lambda: clock[-1], sleep=sleep))
    monkeypatch.setattr(process_groups, "shut_connections", look)
    alone._rendezvous_s, alone._forming = 6, True
    alone._sweep()
    assert shut == [100.0, 102.0, 104.0]
    alone._forming = False
    alone._sweep()
    assert len(shut) == 3


def test_an_aborted_generation_forms_no_more(alone: ProcessGroups) -> None:
    alone.connect()
    alone._aborted.set()
    with pytest.raises(PeerLostError, match=r"^the generation was aborted$"), alone.forming():
        raise AssertionError("it has begun")
    assert not alone._forming
    alone._aborted.clear()
    with pytest.raises(PeerLostError), alone.forming():
        alone._aborted.set()
    assert not alone._forming


def test_an_aborted_rendezvous_says_so(alone: ProcessGroups) -> None:
    alone.abort()
    with pytest.raises(
        PeerLostError, match=r"^rank 0 lost a peer during rendezvous: this generation was abo"
    ):
        alone.connect()
    assert not dist.is_initialized()


def test_a_rank_that_does_not_come_is_missed(store: TCPStore) -> None:
    groups = ProcessGroups("127.0.0.1", store.port, "one of two", 1, 2, timeout_s=1, rendezvous_s=0.2)
    with pytest.raises(PeerLostError, match=r"^rank 1 lost a peer during rendezvous: .* 200ms.*all-arrived"):
        groups.connect()
    groups.close()


def test_a_name_that_was_in_the_store_before_is_refused(store: TCPStore) -> None:
    """Its keys hold the addresses of ranks that are gone; a rank that reads one early would wait for them."""
    ProcessGroups.open("127.0.0.1", store.port, "twice", 0, 1).close()
    again = ProcessGroups("127.0.0.1", store.port, "twice", 0, 1, timeout_s=20)
    with pytest.raises(PeerLostError, match=r"during rendezvous: twice: 2 ranks have come, 1 belong"):
        again.connect()
    again.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_backend_with_an_abort_of_its_own(
    alone: ProcessGroups, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    may_end, called = threading.Event(), list[threading.Thread]()

    def end() -> None:
        called.append(threading.current_thread())
        may_end.wait(10 if hangs else 0.05)
        raise RuntimeError("no group")

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", end)
    monkeypatch.setattr(process_groups, "NCCL_ABORT_S", 0.2)
    alone.backend = "nccl"
    assert alone.abort() is True, "there is nothing yet"
    assert not called
    alone._initialised = True
    assert alone.abort() is not hangs
    (thread,) = called
    assert thread.daemon
    may_end.set()
    alone.backend = "gloo"
    assert alone.abort() is True
    assert len(called) == 1


def test_errors_of_lost_peers_are_told_from_others(alone: ProcessGroups) -> None:
    for text in LOST_PEER_TEXTS:
        assert alone.lost_peer(RuntimeError(f"saw {text} here"))
    assert alone.lost_peer(PeerLostError("x"))
    assert alone.lost_peer(dist.DistBackendError("x"))
    assert not alone.lost_peer(ValueError("gloo"))
    assert not alone.lost_peer(RuntimeError("shapes differ"))
    wrapped = RuntimeError("a stage failed")
    wrapped.__cause__ = RuntimeError("Connection closed")
    assert alone.lost_peer(wrapped)
    wrapped.__cause__ = ValueError("shapes differ")
    assert not alone.lost_peer(wrapped)
    alone._aborted.set()
    assert alone.lost_peer(RuntimeError("shapes differ"))
    assert not alone.lost_peer(ValueError("gloo"))


def test_a_lost_peer_is_said_in_one_line(alone: ProcessGroups) -> None:
    held: list[weakref.ref[threading.Event]] = []
    errors: list[RuntimeError] = []  # others may keep them

    def fail() -> None:
        group = threading.Event()
        held.append(weakref.ref(group))
        errors.append(RuntimeError(f"gloo: {'x' * 400}\nsecond line"))
        raise errors[0]

    with pytest.raises(PeerLostError) as caught, alone.guard("a sum"):
        fail()
    assert str(caught.value) == f"rank 0 lost a peer during a sum: gloo: {'x' * 294}"
    assert caught.value.__context__ is None
    assert held[0]() is None
    with pytest.raises(ValueError, match=r"^own$"), alone.guard("a sum"):
        raise ValueError("own")


def test_what_was_left_behind_is_said_after_the_end(
    alone: ProcessGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def kept(groups: list[object], wait_s: float) -> bool:
        waits.append(wait_s)
        groups.clear()
        return gone

    monkeypatch.setattr(process_groups, "release", kept)
    for given_up, gone in ((False, True), (True, False), (False, False), (True, True)):
        alone.connect()
        assert alone._watch is not None
        alone._watch.given_up = given_up
        assert alone.given_up is given_up
        alone.close()
        assert alone.given_up is not gone
        alone._prefix, alone._left_behind = alone._prefix + "'", False
    assert waits == [process_groups.PROMPT_S, 0.0, process_groups.PROMPT_S, 0.0]


def test_many_ranks_that_wait_leave_the_store_time_for_its_work() -> None:
    assert [meet_poll_s(ranks) for ranks in (1, 100, 1000)] == [0.05, 0.05, 0.5]
