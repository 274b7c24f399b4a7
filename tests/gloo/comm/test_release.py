"""The release of groups, of made-up ones: who waits, and what is said of the thread that does."""

from __future__ import annotations

import atexit
import ctypes
import gc
import signal
import sys
import threading
import time

import pytest

from picotron_ray.comm import group_release
from picotron_ray.comm.group_release import release


class Group:
    """Ends when it may."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.ended_by: list[threading.Thread] = []

    def __del__(self) -> None:
        self.may_end.wait(10)
        self.ended_by.append(threading.current_thread())


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: found.append(1))
    return found


def test_groups_end_on_another_thread(collections: list[int]) -> None:
    group = Group()
    group.may_end.set()
    ended_by, groups = group.ended_by, [group, Group()]
    groups[1].may_end.set()
    del group
    assert release(groups)
    assert groups == []
    assert [thread.name for thread in ended_by] == ["release-groups"]
    assert not collections, "nothing else refers to them"
    assert ended_by[0] not in group_release._inside_torch


def test_a_group_that_does_not_end_is_left_to_its_thread() -> None:
    groups = [Group()]
    may_end, ended_by = groups[0].may_end, groups[0].ended_by
    assert not release(groups, wait_s=0.05)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "release-groups")
    assert thread.daemon
    assert thread in group_release._inside_torch
    may_end.set()
    thread.join(5)
    assert ended_by == [thread]
    assert thread not in group_release._inside_torch


def test_garbage_that_refers_to_groups_is_collected_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, groups = [Group()], [object(), object()]
    kept[0].may_end.set()
    groups.append(kept[0])
    monkeypatch.setattr(gc, "collect", kept.clear)
    assert release(groups)
    assert (kept, groups) == ([], [])
    monkeypatch.setattr(gc, "collect", pytest.fail)
    assert release([]), "nothing to look at"


def test_who_lets_go_of_a_group_last_does_not_wait_in_its_destructor(collections: list[int]) -> None:
    """A traceback or a cache keeps it: its end is the other thread's all the same, once they let go."""
    kept = [Group()]
    may_end, ended_by = kept[0].may_end, kept[0].ended_by
    began = time.monotonic()
    assert not release([object(), kept[0]])
    assert time.monotonic() - began < group_release.PROMPT_S, "nobody knows how long that lasts"
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "release-groups")
    time.sleep(0.1)
    assert thread.is_alive()
    began = time.monotonic()
    kept.clear()
    assert time.monotonic() - began < 1, "not here"
    assert ended_by == []
    may_end.set()
    thread.join(5)
    assert ended_by == [thread]


def test_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda ident, number: calls.append((ident, number)))
    ended, alive = threading.Thread(target=int), threading.current_thread()
    ended.start()
    ended.join()
    for initialised, backend in ((True, "gloo"), (True, "nccl"), (False, "none")):
        world = [object()]
        monkeypatch.setattr(group_release.dist, "is_initialized", lambda i=initialised: i)
        monkeypatch.setattr(group_release.dist, "get_backend", lambda b=backend: b)
        monkeypatch.setattr(type(group_release.dist.distributed_c10d._world), "pg_map", world)
        monkeypatch.setattr(group_release, "_inside_torch", {ended})
        before = sys.getrefcount(world[0])
        group_release._at_exit()
        kept = sys.getrefcount(world[0]) - before
        assert kept == (backend == "gloo"), backend
    assert calls == []
    old = signal.getsignal(signal.SIGRTMAX)
    monkeypatch.setattr(group_release, "_inside_torch", {ended, alive})
    group_release._at_exit()
    assert handler_of(signal.SIGRTMAX) == ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p).value
    signal.signal(signal.SIGRTMAX, old or signal.SIG_DFL)
    assert calls == [(alive.ident, signal.SIGRTMAX)]


def handler_of(number: int) -> int | None:
    """Address of what C has been told to call; takes it away."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    found: int | None = libc.signal(number, None)
    return found


class Seen(list[object]):
    """Equal to nothing; holds what it was compared with."""

    def __eq__(self, other: object) -> bool:
        self.append(other)
        return False

    __hash__ = None  # type: ignore[assignment]


def test_the_end_of_the_process_calls_it() -> None:
    assert not group_release._inside_torch
    registered = Seen()
    atexit.unregister(registered)
    assert group_release._at_exit in list(registered)
