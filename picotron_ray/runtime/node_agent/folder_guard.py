"""Guard of a node's folder against whoever deletes it under a living run (`rm -r`, a cleaner of `/dev/shm`).

Workers keep the files that they have open, so training goes on; but nobody else finds their pages and slots
any more, and nothing would ever be committed again. So the folder is made anew, checked as at its creation.
Then the workers are stopped for a moment, what is sealed is moved out of the files that they hold open
(`slot_rescue`), and they are killed: recovery goes on from that. Where the folder cannot be made, the workers
are left alone, for that loses nothing, and it is tried again.

Until then the agent reads their pages where they hold them open, and heartbeats show them as ever. From the
loss on they are marked as rescued, so that the coordinator awaits the end, and an order to kill one is put
off. That ends where the folder cannot be made, or where the rescue takes longer than its bytes explain.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from picotron_ray.errors import PicotronError, SlotError
from picotron_ray.runtime.heartbeat import PageView, process_alive, read_page
from picotron_ray.runtime.node_agent import slot_rescue

log = logging.getLogger(__name__)
SETTLED_S = 1.0
"""Time for which files are missing before anything is done: who deletes them may still be at it."""
AGAIN_S = 10.0
STOPPED_S = 1.0  # longest that a process may take to stop
PUT_OFF = "put off"
"""Answer to an order to kill a worker that is rescued."""


@dataclass(frozen=True, slots=True)
class Rescue:
    """Mend of a deleted folder: a line for people, and the workers that were killed."""

    text: str
    ended: tuple[str, ...] = ()


class FolderGuard:
    """Watch of one node's folder.

    ``look`` and ``done`` are for one thread, and what is done about a loss is done on another. Any thread may
    ask who is robbed, and who is rescued.
    """

    def __init__(self, folder: Path, claim: Callable[[], None]) -> None:
        """
        Args:
            claim: makes and signs the folder; PicotronError or OSError where it cannot.
        """
        self._folder, self._claim = folder, claim
        self._known: dict[str, tuple[int, int]] = {}  # pid and start of each worker whose page was seen
        self._robbed: dict[str, tuple[int, int]] = {}  # those of them that live, and whose pages are gone
        self._open: dict[str, Path] = {}  # where their pages were last found
        self._held: tuple[frozenset[str], float] = frozenset(), 0.0  # who is rescued, and until when at most
        self._missing_s = 0.0
        self._work: Future[Rescue] | None = None
        self._told = ""
        self._end = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="folder-guard")

    def look(self, pages: Sequence[PageView], now_s: float) -> bool:
        """Whether the folder, or a page of a living worker, is gone; begins to mend that."""
        seen = {page.worker: (page.pid, page.start_ticks) for page in pages}
        robbed = {name: who for name, who in self._known.items() if name not in seen and process_alive(*who)}
        self._known, self._robbed = {**robbed, **seen}, robbed
        if not robbed and self._folder.is_dir():
            self._missing_s, self._told = 0.0, "" if self._work is None else self._told
            return False
        if not self._missing_s:
            self._missing_s = now_s
            self._hold(robbed, SETTLED_S + slot_rescue.LEAST_S)
        elif self._work is None:
            self._held = frozenset(robbed), self._held[1]  # who deletes them may still be at it
        if self._work is None and now_s - self._missing_s >= SETTLED_S:
            self._missing_s = now_s - SETTLED_S + AGAIN_S  # of the next try
            self._work = self._thread.submit(self._rescue, dict(robbed))
        return True

    def done(self) -> Rescue | None:
        """Return what was done since the last call; a failure that was told already is not told again."""
        if self._work is None or not self._work.done():
            return None
        work, self._work = self._work, None
        self._held = frozenset(), 0.0
        rescue = work.result()
        if rescue.text == self._told:
            return None
        self._told = rescue.text
        return rescue

    def close(self) -> None:
        """Begin nothing any more, and end what is under way."""
        self._end.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    # --- who is robbed --------------------------------------------------------------------------------------

    def _hold(self, workers: Iterable[str], limit_s: float) -> None:
        self._held = frozenset(workers), time.monotonic() + limit_s

    @property
    def rescued(self) -> frozenset[str]:
        """Workers that are about to be stopped, or are, until their slots are saved."""
        held, until_s = self._held
        return held if time.monotonic() <= until_s else frozenset()

    def robbed(self) -> list[PageView]:
        """Pages of living workers that were deleted, as far as they can be read where they are open."""
        found = ((name, self._read(name, pid)) for name, (pid, _) in self._robbed.items())
        return [replace(page, worker=name) for name, page in found if page is not None]

    def forsaken(self) -> list[PageView]:
        """Those of `robbed` that are not rescued: they train on, and may hang."""
        return [page for page in self.robbed() if page.worker not in self.rescued] if self._robbed else []

    def check_saved(self) -> None:
        """Raise SlotError while slots are saved: who counts them then finds too few."""
        if rescued := self.rescued:
            names = ", ".join(sorted(rescued))
            raise SlotError(f"{self._folder} was deleted, and slots of {names} are being saved; ask later")

    def _read(self, worker: str, pid: int) -> PageView | None:
        name = f"{worker}.page"
        page = read_page(self._open[worker]) if worker in self._open else None
        if page is None or page.pid != pid:
            files = slot_rescue.deleted_files(pid, self._folder, ".page")
            path = next((path for path, found in files if found == name), None)
            if path is None:
                return None
            self._open[worker], page = path, read_page(path)
        return page

    def figures(self, pages: Sequence[PageView]) -> list[dict[str, Any]]:
        """Return what a heartbeat carries of the workers with these pages, and of the robbed ones.

        Of one whose page cannot be read that is its name alone.
        """
        rescued = self.rescued
        told = {page.worker: page.figures() for page in (*pages, *self.robbed())}
        for worker in (*self._robbed, *rescued):
            told.setdefault(worker, {"worker": worker})
        return [{**page, "rescued": True} if name in rescued else page for name, page in told.items()]

    # --- on the thread --------------------------------------------------------------------------------------

    def _rescue(self, robbed: dict[str, tuple[int, int]]) -> Rescue:
        lost = f"snapshot.folder: {self._folder} was deleted while the run uses it"
        try:
            self._claim()
        except (PicotronError, OSError) as error:
            self._hold((), 0.0)
            return Rescue(
                f"{lost}, and cannot be made anew: {error}; training goes on, but nothing is committed until"
                " it can"
            )
        pids = [pid for pid, _ in robbed.values()]
        self._hold(robbed, STOPPED_S + slot_rescue.LEAST_S)
        try:
            _stop(pids)
            saved = self._save(robbed, pids)
        finally:
            for pid in pids:
                _signal(pid, signal.SIGKILL)
        workers = tuple(sorted(robbed))
        return Rescue(
            f"{lost}; it is made anew, {saved} slots are saved, and workers {', '.join(workers) or '(none)'}"
            " are started again",
            workers,
        )

    def _save(self, robbed: dict[str, tuple[int, int]], pids: Sequence[int]) -> int:
        slots = slot_rescue.held_slots(pids, self._folder)
        limit_s = slot_rescue.limit_s(slots)
        self._hold(robbed, limit_s + slot_rescue.LEAST_S)  # they are killed then
        move = slot_rescue.Move(slots, self._folder, time.monotonic() + limit_s, self._end)
        try:
            move.run()
        finally:
            slot_rescue.close(slots)
        return move.saved


def _stop(pids: Sequence[int]) -> None:
    """Stop processes, and wait until they stand still: what they write must not be torn."""
    for pid in pids:
        _signal(pid, signal.SIGSTOP)
    until_s = time.monotonic() + STOPPED_S
    while not all(map(_stands, pids)) and time.monotonic() < until_s:
        time.sleep(0.01)


def _stands(pid: int) -> bool:
    """Whether no thread of a process runs."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # it has ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return all(state in "TtZX" for state in states)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        log.debug("process %d has ended", pid)
