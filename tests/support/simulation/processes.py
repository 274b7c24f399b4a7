"""Processes of blocking code in virtual time: threads that move only while the simulation waits for them.

So real code that calls storage, sleeps and is stopped amid a call takes part in a simulation event for event:
one thread runs at a time, and who comes next follows from the simulation's clock alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from picotron_ray.coordinator.simulator.world import Sim

Done = Callable[[Any, Exception | None], None]


class EndedError(BaseException):
    """The process is gone; its thread unwinds, and no handler of errors keeps it."""


class Processes:
    """All processes of one simulation."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.back = threading.Semaphore(0)  # released when the running process waits, or has ended
        self.waiting: set[Process] = set()
        self._here = threading.local()

    def current(self) -> Process | None:
        """Process whose own thread asks; None: the simulation's, or a thread that a process has started."""
        return getattr(self._here, "process", None)

    def enter(self, process: Process) -> None:
        self._here.process = process

    def close(self) -> None:
        """End all threads."""
        for process in list(self.waiting):
            process.end()


class Process:
    """Process that does one piece of work after the other.

    Args:
        alive: whether it still is there, asked whenever it would go on.
        stopped_until: time before which it does not go on (a stop signal).
    """

    def __init__(
        self,
        processes: Processes,
        alive: Callable[[], bool] = lambda: True,
        stopped_until: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._all, self._alive, self._stopped_until = processes, alive, stopped_until
        self._go = threading.Semaphore(0)
        self._queue: deque[tuple[Callable[[], Any], Done]] = deque()
        self._busy = self._ended = self._finished = False
        self._turn = 0
        self._result: tuple[Any, Exception | None] = None, None

    def do(self, work: Callable[[], Any], done: Done) -> None:
        """Do a piece of work once those before it are done; ``done`` hears its result, or its error."""
        self._queue.append((work, done))
        if not self._busy:
            self._busy = True
            self._all.sim.after(0.0, self._begin)

    def _begin(self) -> None:
        if self._ended or not self._alive():
            return
        work, _ = self._queue[0]
        self._finished = False
        threading.Thread(target=self._body, args=(work,), daemon=True).start()
        self._step()

    def _body(self, work: Callable[[], Any]) -> None:
        self._all.enter(self)
        self._go.acquire()
        try:
            self._result = work(), None
        except EndedError:
            self._ended = True
        except Exception as error:  # noqa: BLE001 (handed to whoever asked for the work)
            self._result = None, error
        self._finished = True
        self._all.back.release()

    def _step(self) -> None:
        """Let the thread run until it waits or has ended."""
        self._go.release()
        self._all.back.acquire()
        if not self._finished or self._ended:
            return
        _, done = self._queue.popleft()
        self._busy = bool(self._queue)
        if self._queue:
            self._all.sim.after(0.0, self._begin)
        done(*self._result)

    def pause(self, seconds: float) -> None:
        """Let time pass; called by the process itself, or by a thread that it waits for."""
        if self._ended:
            raise EndedError
        self._turn += 1
        self._all.sim.after(seconds, self._resume, self._turn)
        self._all.waiting.add(self)
        self._all.back.release()
        self._go.acquire()
        if self._ended:
            raise EndedError

    def wake(self) -> None:
        """End its pause now."""
        self._turn += 1
        self._all.sim.after(0.0, self._resume, self._turn)

    def _resume(self, turn: int) -> None:
        if turn != self._turn or self not in self._all.waiting:
            return
        stopped_s = self._stopped_until() - self._all.sim.now
        if not self._alive():
            self.end()
        elif stopped_s > 0:
            self._all.sim.after(stopped_s + 0.001, self._resume, turn)
        else:
            self._all.waiting.discard(self)
            self._step()

    def end(self) -> None:
        """Unwind its thread, as a process that was killed."""
        self._ended = True
        if self in self._all.waiting:
            self._all.waiting.discard(self)
            self._go.release()
            self._all.back.acquire()


class VirtualEvent:
    """``threading.Event`` of processes."""

    def __init__(self, processes: Processes) -> None:
        self._all = processes
        self._set = False
        self._waiter: Process | None = None

    def set(self) -> None:
        self._set = True
        if self._waiter is not None:
            self._waiter.wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float) -> bool:
        process = self._all.current()
        assert process is not None
        if not self._set:
            self._waiter = process
            process.pause(timeout)
            self._waiter = None
        return self._set
