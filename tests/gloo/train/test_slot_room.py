"""Slots of workers of one node, locked in turn and waited for before the first step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from picotron_ray.checkpoint.snapshot.folder_turn import folder_turn
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool
from picotron_ray.train import slot_room
from picotron_ray.train.slot_room import POLL_S, SlotRoom

SIZE = 1 << 16


class Locks:
    """Locks of a node's driver, which takes its time; ``most``: workers that it was asked by at a time."""

    def __init__(self) -> None:
        self.may_end, self.asked = threading.Event(), threading.Event()
        self.may_end.set()
        self.now = self.most = self.locked = 0

    def lock(self, address: int, length: int) -> bool:
        self.now += 1
        self.most = max(self.most, self.now)
        self.asked.set()
        assert self.may_end.wait(10)
        time.sleep(0.02)
        self.now -= 1
        self.locked += 1
        return True

    def unlock(self, address: int) -> None:
        pass


class Worker:
    """One worker's slots and what its page hears."""

    def __init__(self, folder: Path, name: str, locks: Locks) -> None:
        self.told: list[str] = []
        self.pool = SlotPool(folder, name, 3, SIZE, locks=locks)
        self.executor = ThreadPoolExecutor(1)
        self.room = SlotRoom(self.pool, SIZE, lambda: (0, 0, 0), self.growth, self.executor)

    @contextmanager
    def growth(self) -> Iterator[Callable[[], None]]:
        self.told.append("grow")
        yield lambda: self.told.append("moved")
        self.told.append("before")

    def close(self) -> None:
        self.room.close()
        self.executor.shutdown()
        self.pool.close(unlink=True)


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_one_worker_of_a_node_locks_at_a_time(tmp_path: Path) -> None:
    locks = Locks()
    workers = [Worker(tmp_path, name, locks) for name in "abc"]
    threads = [in_background(worker.room.lock_before_steps) for worker in workers]
    for thread in threads:
        thread.join(10)
    assert (locks.most, locks.locked) == (1, 9)
    assert all(worker.pool.locked for worker in workers)
    for worker in workers:
        worker.close()
    assert list(tmp_path.iterdir()) == []


def test_a_slot_that_takes_long_is_no_hang_until_it_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_room, "LOCK_S", 5 * POLL_S)
    locks = Locks()
    locks.may_end.clear()
    worker = Worker(tmp_path, "a", locks)
    waiting = in_background(worker.room.lock_before_steps)
    waiting.join(10 * POLL_S)
    heard = worker.told.count("moved")
    assert heard >= 2
    waiting.join(4 * POLL_S)
    assert worker.told.count("moved") == heard, "no more"
    locks.may_end.set()
    waiting.join(10)
    assert (worker.told[0], worker.told[-1]) == ("grow", "before")
    assert worker.pool.locked
    worker.close()


def test_who_is_called_away_waits_for_no_lock(tmp_path: Path) -> None:
    locks = Locks()
    locks.may_end.clear()
    worker = Worker(tmp_path, "a", locks)
    waiting = in_background(worker.room.lock_before_steps)
    assert locks.asked.wait(10)
    worker.room.stop_waiting()
    waiting.join(5)
    assert not waiting.is_alive()
    locks.may_end.set()
    worker.close()
    assert locks.locked == 1, "and the next slot is not begun"


@pytest.mark.parametrize("why", ["late", "called away"])
def test_a_turn_is_waited_for_with_a_bound(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slot_room, "TURN_S", 0.2 if why == "late" else 60.0)
    locks, worker = Locks(), None
    with folder_turn(tmp_path, lambda: False, 0.0) as ours, caplog.at_level(logging.WARNING):
        assert ours
        worker = Worker(tmp_path, "a", locks)
        if why == "called away":
            threading.Timer(0.2, worker.room.stop_waiting).start()
        waiting = in_background(worker.room.lock_before_steps)
        waiting.join(5)
        assert not waiting.is_alive()
    assert locks.locked == 0
    assert ("are not locked" in caplog.text) == (why == "late")
    assert worker.pool.unlocked, "the next generation tries it again"
    worker.close()


def test_a_folder_without_locks_fails_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker(tmp_path, "a", Locks())
    worker.pool.folder = tmp_path / "gone"
    worker.room.lock_before_steps()
    assert "are not locked" in caplog.text
    worker.close()


def test_a_turn_ends_with_whatever_is_raised_in_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), folder_turn(tmp_path, lambda: False, 0.0):
        raise KeyError
    with folder_turn(tmp_path, lambda: False, 0.0) as ours:
        assert ours
        with folder_turn(tmp_path, lambda: False, 0.0) as another:
            assert not another
