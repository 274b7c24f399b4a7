"""Sign of life of a run's coordinator, in its storage, for those that can reach nothing else of the run.

Whoever claims a term fences the coordinator before it, and so ends a run that goes on. A door on the run's
own machine or cluster sees the coordinator; one elsewhere sees storage alone. So a coordinator puts
``life/<term>`` each ``LIFE_S``, from its claim on, and says there when it has ended. One that was silent for
``SILENT_S`` is dead: Ray starts a coordinator again in less, and a driver gives one up after as much.

Ages are differences of times by the storage's clock, so machines' clocks do not matter. Each term has a key
of its own: a fenced coordinator goes on signing for as long as it does not know. A term without one was
claimed by a command, or by an earlier version, and is nobody's life, or by a coordinator that is about to
sign: a claim of the last ``SILENT_S`` is watched, as is a sign that cannot be read.

Silence need not be waited for where death shows: the coordinator's process and its raylet, which would start
it again, are gone from this machine, or this process is connected to the very Ray that has no such
coordinator.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from picotron_ray.checkpoint.storage.base import Storage, StoredObject, clock_s, encode_json, get_json
from picotron_ray.checkpoint.store.run_log import Entry, RunLog, entry_key
from picotron_ray.errors import CorruptError, NotFoundError
from picotron_ray.runtime.ray_cluster import local_ray, processes

log = logging.getLogger(__name__)
LIFE_S = 15.0
SILENT_S = 120.0
END_S = 5.0
"""Longest wait for storage to take the last sign: without it a launch elsewhere waits, and no more."""
MOST_PUTS = 8
"""Signs under way at once: where storage hangs, one is given up after its calls' deadline, or later."""
PREFIX = "life/"
COORDINATOR = re.compile(r".+:\d+")
"""Owner of a term that a coordinator claimed: its host and process; commands say more."""


@dataclass(frozen=True, slots=True)
class ProcessSpace:
    """Space of process ids: in two equal ones an id is of the same process."""

    host: str
    boot: str
    namespace: str


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a machine; ``started`` tells it from a later one of its id."""

    pid: int
    started: str


@dataclass(frozen=True, slots=True)
class Life:
    """Coordinator of the newest term, as its last sign told.

    Fields:
        beat: number of the sign.
        ended: status of the run's end; "": it has not ended.
        raylet: starts the coordinator again.
        session: name that Ray gave its cluster; "": none.
        address: of that cluster; "": it is the run's own, which nobody else can connect to.
        age_s: since the sign.
    """

    term: int
    beat: int
    ended: str
    machine: ProcessSpace
    process: Process
    raylet: Process
    session: str
    address: str
    age_s: float

    def seen_here(self, here: ProcessSpace | None = None) -> Literal["alive", "dead", ""]:
        """Tell what this machine shows of it; "": nothing."""
        if _ray_session() == self.session != "":
            return "dead"  # the caller looked for it there by its name
        if self.machine != (here or this_space()):
            return ""
        if processes.lives(self.process.pid, self.process.started):
            return "alive"
        return "" if processes.lives(self.raylet.pid, self.raylet.started) else "dead"

    @property
    def where(self) -> str:
        """Name the process and its Ray, for messages."""
        ray = f", in the Ray at {self.address}" if self.address else ""
        return f"coordinator of term {self.term}, process {self.process.pid} on {self.machine.host}{ray}"


def this_space() -> ProcessSpace:
    """Return the machine that this process sees its process ids in."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return ProcessSpace(
        os.uname().nodename,
        boot.read_text().strip() if boot.exists() else "",
        os.readlink("/proc/self/ns/pid") if Path("/proc/self/ns/pid").is_symlink() else "",
    )


def newest_term(storage: Storage) -> int:
    """Return the newest term that was claimed, by whomever; 0: none was."""
    claim = _newest_claim(storage)
    return 0 if claim is None else claim.term


def _newest_claim(storage: Storage) -> Entry | None:
    entries = RunLog(storage)
    entries.refresh()
    claims = [entry for entry in entries.entries() if entry.kind == "term"]
    return max(claims, key=lambda entry: entry.term, default=None)


def newest_life(storage: Storage) -> Life | None:
    """Return the sign of the newest term's coordinator; None where it ended, or there is none.

    Touches: puts one object, to learn the storage's time, where a sign was found.
    """
    claim = _newest_claim(storage)
    if claim is None:
        return None
    key = _key(claim.term)
    listed = [entry for entry in storage.list(key) if entry.key == key]
    if not listed:
        return _unsigned(storage, claim)
    try:
        said = get_json(storage, key)
        if said["ended"]:
            return None
        return _read(said, clock_s(storage) - listed[0].mtime_s)
    except (NotFoundError, CorruptError, KeyError, TypeError) as error:
        log.warning("the sign of life %s cannot be read: %s", key, error)
        return _unknown(storage, claim, listed[0], beat=int(listed[0].mtime_s * 1000))


def _read(said: dict[str, Any], age_s: float) -> Life:
    """Read a sign; KeyError or TypeError where it is none."""
    return Life(
        **{name: said[name] for name in ("term", "beat", "ended", "session", "address")},
        machine=ProcessSpace(**said["machine"]),
        process=Process(**said["process"]),
        raylet=Process(**said["raylet"]),
        age_s=max(age_s, 0.0),
    )


def seems_alive(storage: Storage, term: int, now_s: float) -> bool:
    """Whether a term's coordinator seems to live, for those who only look: nothing is written.

    Args:
        now_s: seconds since the epoch by this machine's clock, which stands for the storage's.
    """
    key = _key(term)
    listed = [entry for entry in storage.list(key) if entry.key == key]
    if not listed:
        return False
    age_s = now_s - listed[0].mtime_s
    try:
        said = get_json(storage, key)
        seen = "dead" if said["ended"] else _read(said, age_s).seen_here()
    except (NotFoundError, CorruptError, KeyError, TypeError):
        seen = ""
    return seen == "alive" or (not seen and age_s < SILENT_S)


def _unsigned(storage: Storage, claim: Entry) -> Life | None:
    """Return the life of a coordinator that claimed its term lately, and has yet to sign; None: of none."""
    key = entry_key(claim.seq)
    listed = [entry for entry in storage.list(key) if entry.key == key]  # an older one is in a block
    if not listed or not COORDINATOR.fullmatch(str(claim.body.get("owner", ""))):
        return None
    found = _unknown(storage, claim, listed[0])
    return found if found.age_s < SILENT_S else None


def _unknown(storage: Storage, claim: Entry, last: StoredObject, beat: int = 0) -> Life:
    """Life of which no more is known than who claimed the term, and when it was heard."""
    host, _, pid = str(claim.body.get("owner", "")).rpartition(":")
    process = Process(int(pid) if pid.isdecimal() else 0, "")
    age_s = max(clock_s(storage) - last.mtime_s, 0.0)
    nowhere = ProcessSpace(host, "", "not known")
    return Life(claim.term, beat, "", nowhere, process, Process(0, ""), "", "", age_s)


class LifeSign:
    """Signs of this process for a term, on a thread of its own: no loop and no commit is in their way."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._said: dict[str, Any] = {}
        self._over = threading.Event()
        self._one = threading.Lock()
        self._listing = threading.Lock()
        self._puts: list[threading.Thread] = []
        self._thread: threading.Thread | None = None

    def begin(self, term: int) -> None:
        """Sign from now on; never blocks."""
        context = _ray_context()
        pid, parent = os.getpid(), os.getppid()
        self._said = {
            "term": term,
            "beat": 0,
            "ended": "",
            "machine": asdict(this_space()),
            "process": asdict(Process(pid, processes.started(pid))),
            "raylet": asdict(Process(parent, processes.started(parent))),
            "session": _ray_session(),
            "address": "" if context is None or os.environ.get(local_ray.ENDED) else str(context.gcs_address),
        }
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_signing, name="life-sign", daemon=True)
            self._thread.start()

    def end(self, status: str) -> None:
        """Say that the run has ended: nobody need wait. Storage that hangs keeps it from no more."""
        self._over.set()
        if self._said and not self._said["ended"]:
            last = threading.Thread(target=self._sign_last, args=(status,), name="life-end", daemon=True)
            last.start()
            last.join(END_S)

    def close(self) -> None:
        """Sign no more."""
        self._over.set()

    def _keep_signing(self) -> None:
        while not self._over.is_set():
            self._begin_put()
            self._over.wait(LIFE_S)

    def _begin_put(self) -> None:
        """Sign on a thread of its own: one that hangs is in no other's way. What the end finds has begun."""
        with self._listing:
            self._puts = [put for put in self._puts if put.is_alive()]
            if len(self._puts) < MOST_PUTS and not self._over.is_set():
                put = threading.Thread(target=self._sign, name="life-put", daemon=True)
                put.start()
                self._puts.append(put)

    def _sign_last(self, status: str) -> None:
        """Say that the run has ended, after what is under way, which would say later that it goes on."""
        until_s = time.monotonic() + END_S / 2
        with self._listing:
            puts = list(self._puts)
        for put in puts:
            put.join(max(until_s - time.monotonic(), 0.0))
        self._sign(status)

    def _sign(self, ended: str = "") -> None:
        with self._one:
            if self._said["ended"]:
                return  # a sign that was under way while the end was told
            self._said |= {"beat": self._said["beat"] + 1, "ended": ended}
            key, sign = _key(self._said["term"]), encode_json(self._said)
        try:
            self._storage.put(key, sign)
        except Exception as error:  # noqa: BLE001 - whatever storage does, the run goes on, and the next is due
            log.info("no sign of life in storage: %s", error)


def remove_older(storage: Storage, term: int) -> None:
    """Remove the signs of terms before this one."""
    for entry in storage.list(PREFIX):
        if entry.key < _key(term):
            storage.delete(entry.key)


def _key(term: int) -> str:
    return f"{PREFIX}{term:06d}.json"


def _ray_context() -> Any:
    """Context of the Ray that this process is connected to; None where it is to none."""
    ray = sys.modules.get("ray")
    return ray.get_runtime_context() if ray is not None and ray.is_initialized() else None


def _ray_session() -> str:
    context = _ray_context()
    return "" if context is None else str(context.get_session_name())
