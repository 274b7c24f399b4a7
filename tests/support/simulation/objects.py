"""Objects of a simulated storage, and clients that reach it through time, outages and lost replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from picotron_ray.checkpoint.storage.base import StoredObject
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.errors import AlreadyExistsError, NotFoundError, StorageUnavailableError
from tests.support.simulation.processes import Process, Processes

T = TypeVar("T")
DELAYED = 0.4  # share of the calls that take time; all others are over at once
SWEEPS = ("chunks", "manifests", "condemned", "intents")
"""Folders that a collector lists and empties, which takes long where there are many objects."""
ANSWER_S = 0.01  # from when the log is read to when that is known
OUTAGE_POLL_S = 1.0
BUSY, LATER_S = 0.05, 0.4
"""Share of a batch's keys that are not deleted, and longest time until the server has deleted the others."""


class Objects:
    """Objects by key; ``watcher`` is told of every change, with the client that made it."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.held: dict[str, tuple[bytes, float]] = {}
        self.stored: Callable[[Client, str, bytes], None] = lambda client, key, data: None
        self.deleting: Callable[[Client, str], None] = lambda client, key: None
        self.looked: Callable[[Client, str], None] = lambda client, key: None
        self.batch: Callable[[Client, str], None] = lambda client, key: None
        self.told: Callable[[Client, str], None] = lambda client, before: None

    def put(self, client: Client, key: str, data: bytes) -> None:
        self.held[key] = data, self.sim.now
        self.stored(client, key, data)

    def delete(self, client: Client, key: str) -> None:
        if key in self.held:
            self.deleting(client, key)
            self.held.pop(key, None)

    def get(self, key: str) -> bytes:
        if key not in self.held:
            raise NotFoundError(f"{key} is not there")
        return self.held[key][0]

    def list(self, prefix: str) -> list[StoredObject]:
        keys = sorted(key for key in self.held if key.startswith(prefix))
        return [StoredObject(key, len(self.held[key][0]), self.held[key][1]) for key in keys]


class Client:
    """Storage as one process sees it.

    Only lists and changes take time, or wait for an outage to end: a real reader asks several threads at once
    for what a list has named. ``latest`` is the kind of its process's call before this one, with the folder.

    Args:
        process: that waits; None: the simulation itself, for which nothing takes time or fails.
        down_until: when the client's own outage is over, beside the storage's.
    """

    def __init__(
        self,
        objects: Objects,
        processes: Processes,
        process: Process | None,
        down_until: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._objects, self._processes, self._process = objects, processes, process
        self._down_until = down_until
        self.save = ""  # start of the keys of the intents of the save that it is for
        self._latest: dict[Process | None, str] = {}
        self.term = 0  # of the coordinator; 0: it is none

    where = "the simulated storage"

    @property
    def latest(self) -> str:
        return self._latest.get(self._process_now(), "")

    def _process_now(self) -> Process | None:
        return self._processes.current() or self._process

    def put(self, key: str, data: bytes) -> None:
        self._call(f"put {_folder(key)}", lambda: self._objects.put(self, key, data), changes=True)

    def put_if_absent(self, key: str, data: bytes) -> None:
        def put() -> None:
            there = self._objects.held.get(key)
            if there is None:
                self._objects.put(self, key, data)
            elif there[0] != data:
                raise AlreadyExistsError(f"{key} is there already")

        self._call(f"put {_folder(key)}", put, changes=True)

    def get(self, key: str) -> bytes:
        self._read(key)
        return self._objects.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._read(key)
        return self._objects.get(key)[start : start + length]

    def size(self, key: str) -> int | None:
        self._fail_if_down()
        self._objects.looked(self, key)
        held = self._objects.held.get(key)
        return None if held is None else len(held[0])

    def list(self, prefix: str) -> Iterator[StoredObject]:
        return iter(self._call(f"list {_folder(prefix)}", lambda: self._objects.list(prefix)))

    def delete(self, key: str) -> None:
        self._call(f"delete {_folder(key)}", lambda: self._objects.delete(self, key), changes=True)

    def delete_many(self, keys: Sequence[str], until_s: float) -> Sequence[str]:
        """Delete as a server does it, once it has the request: some at once, some later, some not at all."""
        sim, process = self._objects.sim, self._process_now()
        if process is None or sim.now > until_s:
            for key in keys if process is None else ():
                self._objects.delete(self, key)
            return () if process is None else keys
        self._objects.batch(self, keys[0])
        hung = sim.now < sim.storage.hung_until
        left: list[str] = []
        longest_s = [0.0]

        def work() -> None:
            if sim.now > until_s and not hung:
                left.extend(keys)
                return
            for key in keys:
                if sim.rng.chance(BUSY):
                    left.append(key)
                elif sim.now >= sim.storage.mute_until and sim.rng.chance(DELAYED):
                    later_s = sim.rng.uniform(0.0, LATER_S)
                    longest_s.append(later_s)
                    sim.after(later_s, self._objects.delete, self, key)
                else:
                    self._objects.delete(self, key)

        self._call(f"delete_many {_folder(keys[0])}", work, changes=True)
        process.pause(max(longest_s) + 0.001)
        return left

    def _read(self, key: str) -> None:
        self._fail_if_down()

    def _fail_if_down(self) -> None:
        if self._process is not None and self._objects.sim.now < self._down():
            raise StorageUnavailableError("the simulated storage is down")

    def _down(self) -> float:
        return max(self._objects.sim.storage.down_until, self._down_until())

    def _call(self, what: str, work: Callable[[], T], changes: bool = False) -> T:
        process = self._process_now()
        if process is None:
            done = work()
            self._latest[None] = what
            return done
        if what.startswith("delete"):  # it goes out at once: who is stopped is stopped before or after it
            self._reach(process, what, work, changes)
            self._wait(process, what)
            return None  # type: ignore[return-value]
        before = self.latest
        self._wait(process, what)
        found = self._reach(process, what, work, changes)
        if what == "list log":
            self._objects.told(self, before)
            process.pause(ANSWER_S)  # who is stopped now knows what was true before
        return found

    def _wait(self, process: Process, what: str) -> None:
        sim = self._objects.sim
        storage, rng = sim.storage, sim.rng
        if sim.now < storage.slow_until:
            process.pause(rng.uniform(0.05, 0.5))
        elif rng.chance(DELAYED):
            long = what.partition(" ")[2] in SWEEPS and not what.startswith("put")
            process.pause(rng.uniform(0.05, 0.8) if long else rng.uniform(0.001, 0.04))

    def _reach(self, process: Process, what: str, work: Callable[[], T], changes: bool) -> T:
        """Do a call once storage is there; nothing is known of one whose answer is lost."""
        sim = self._objects.sim
        storage, rng = sim.storage, sim.rng
        until = sim.now + sim.job.storage.retry_deadline_s
        while True:
            if sim.now < storage.hung_until:
                process.pause(storage.hung_until - sim.now + 0.01)
            if sim.now >= self._down():
                found: Any = work()
                self._latest[process] = what
                if not (changes and sim.now < storage.mute_until and rng.chance(0.6)):
                    return found
            if sim.now >= until:
                raise StorageUnavailableError("the simulated storage does not answer")
            process.pause(OUTAGE_POLL_S)


def _folder(key: str) -> str:
    return key.partition("/")[0]
