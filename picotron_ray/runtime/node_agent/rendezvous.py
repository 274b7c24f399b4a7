"""Rendezvous store of a node, found again by every process of the node's agent.

The server is a process of its own session, below the node's Ray rather than below the agent
(`comm.rendezvous_store`). It writes its address into the node's folder, and lives as long as that file: an
agent that Ray restarts takes it over with all its clients, and the next generation finds it listening. The
record names the actor that it belongs to. Another run's keys must never be met under the prefixes of this
one, so a server of another actor is ended and replaced. One that died, or does not answer any more, is
replaced before the next generation asks for its address: whoever still waits for it would wait for ever.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from picotron_ray.comm.rendezvous_store import read_record
from picotron_ray.errors import PicotronError
from picotron_ray.runtime.heartbeat import process_alive

log = logging.getLogger(__name__)
RECORD = "rendezvous.json"
POLL_S = 0.02
START_TIMEOUT_S = 40.0
FROZEN_S = 1.0
"""Age of the record from which on its server counts as silent: it touches the record five times a second."""
AGAIN_S = 10.0
"""Pause between two starts of servers that nobody waits for."""
GRACE_S = 2.0
"""Time for a silent server to touch it, while this process looks: else it is frozen, and is replaced.

A client that has connected to a frozen server learns nothing of its end: torch tries the address again until
the rendezvous itself takes too long. So whoever asks for the address waits rather than gets a frozen one's.
"""


class RendezvousServer:
    """Server of one node, for its agent; any thread may call it.

    A server may take long to listen. Only who asks for its address waits for that, and without the lock: the
    agent's greeting and its end must not wait with it.
    """

    def __init__(self, folder: Path, host: str, owner: str, ray_pid: int) -> None:
        """
        Args:
            folder: the node's; it holds the record.
            host: address that clients connect to.
            owner: identity of the agent's actor, the same in all its processes.
            ray_pid: process of the node's Ray, with which the server ends.
        """
        self._path, self._host, self._owner, self._ray_pid = folder / RECORD, host, owner, ray_pid
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._again_s, self._silent_s = 0.0, math.inf
        self.replaced = 0
        """How many servers were found frozen, or did not start."""

    def start(self) -> None:
        """Begin to start a server where none lives; it takes seconds to listen. Never waits."""
        if self._lock.acquire(blocking=False):  # else somebody else does
            try:
                self._start()
            finally:
                self._lock.release()

    def keep(self, now_s: float) -> None:
        """Replace a server that died or is frozen, before the next generation asks for it; never waits."""
        if now_s < self._again_s or self._stopped.is_set() or not self._lock.acquire(blocking=False):
            return
        try:
            frozen = self._is_frozen(now_s)
            if frozen:
                self._replace()
            if frozen or (self._living() is None and not self._starting()):
                self._again_s = now_s + AGAIN_S
                self._start()
        finally:
            self._lock.release()

    def address(self) -> tuple[str, int]:
        """Return the (host, port) of the living server, or of a new one once it listens.

        Raises:
            PicotronError: it ended before it listened, took too long, or ``stop`` was called meanwhile.
        """
        while not (frozen := self._is_frozen(time.monotonic())) and self._silent_s < math.inf:
            if self._stopped.wait(POLL_S):
                break
        with self._lock:
            if frozen and self._is_frozen(time.monotonic()):  # nobody else has replaced it meanwhile
                log.warning("the rendezvous store at %s is frozen: it is replaced", self._host)
                self._replace()
            self._start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while (record := self._living()) is None:
            with self._lock:
                self._refuse_failed(deadline)
            self._stopped.wait(POLL_S)
        return record["host"], record["port"]

    def _refuse_failed(self, deadline: float) -> None:
        """Raise PicotronError where there is no server any more that may still come to listen."""
        if self._stopped.is_set():
            raise PicotronError(f"the rendezvous store at {self._host} was stopped: the run has ended here")
        if self._living() is not None:  # since the caller looked
            return
        if not self._starting() or time.monotonic() > deadline:
            self._replace()
            raise PicotronError(
                f"the rendezvous store at {self._host} did not start; the node's log says why"
            )

    def _is_frozen(self, now_s: float) -> bool:
        """Whether a living server is silent, and was at a look before: not the whole node stood still.

        ``_silent_s`` is when it was first found silent.
        """
        if self._living() is None or self._age_s() <= FROZEN_S:
            self._silent_s = math.inf
            return False
        self._silent_s = min(self._silent_s, now_s)
        return now_s - self._silent_s > GRACE_S

    def _age_s(self) -> float:
        try:
            return time.time() - self._path.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _replace(self) -> None:
        self.replaced += 1
        self._silent_s = math.inf
        self._kill(read_record(self._path))

    def stop(self) -> None:
        """End the server of this agent, if there is one; none is started any more."""
        self._stopped.set()
        with self._lock:
            record = read_record(self._path)
            self._kill(None if record is None or record["owner"] != self._owner else record)

    def _start(self) -> None:
        if self._stopped.is_set():
            return
        if self._living() is not None or self._starting():
            return
        self._kill(read_record(self._path))
        command = [sys.executable, "-m", "picotron_ray.comm.rendezvous_store"]
        command += ["--parent-pid", str(self._ray_pid), "--host", self._host]
        command += ["--record", str(self._path), "--owner", self._owner]
        # a session of its own: whatever ends the agent and all of its group does not end the server
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)

    def _starting(self) -> bool:
        """Whether a process of this agent runs that is, or may come to be, the server."""
        return self._process is not None and self._process.poll() is None

    def _living(self) -> dict[str, Any] | None:
        """The record of a server of this agent that lives."""
        record = read_record(self._path)
        if record is None or record["owner"] != self._owner:
            return None
        return record if process_alive(record["pid"], record["start_ticks"]) else None

    def _kill(self, record: dict[str, Any] | None) -> None:
        if record is not None:
            self._path.unlink(missing_ok=True)
            if process_alive(record["pid"], record["start_ticks"]):
                os.kill(record["pid"], signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
