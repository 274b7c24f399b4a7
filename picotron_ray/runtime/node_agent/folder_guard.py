"""Guard of a node's folder against whoever deletes it under a living run (`rm -r`, a cleaner of `/dev/shm`).

Workers keep the files that they have open, so training goes on; but nobody else finds their pages and slots
any more, and nothing would ever be committed again. So the folder is made anew, checked as at its creation.
Then the workers are stopped for a moment, what is sealed is copied out of the files that they hold open
(`/proc/PID/fd`), and they are killed: recovery goes on from the copies. Where the folder cannot be made, the
workers are left alone, for that loses nothing, and it is tried again.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from picotron_ray.checkpoint.snapshot.slot_pool import SUFFIX
from picotron_ray.checkpoint.snapshot.slot_reader import read_header
from picotron_ray.errors import PicotronError, SlotError
from picotron_ray.runtime.heartbeat import PageView, process_alive

log = logging.getLogger(__name__)
SETTLED_S = 1.0
"""Time for which files are missing before anything is done: who deletes them may still be at it."""
AGAIN_S = 10.0
DELETED = " (deleted)"  # after the target of a link in /proc/PID/fd


@dataclass(frozen=True, slots=True)
class Rescue:
    """Mend of a deleted folder: a line for people, and the workers that were killed."""

    text: str
    ended: tuple[str, ...] = ()


class FolderGuard:
    """Watch of one node's folder; for one thread, but what it does about a loss is done on another."""

    def __init__(self, folder: Path, claim: Callable[[], None]) -> None:
        """
        Args:
            claim: makes and signs the folder; PicotronError or OSError where it cannot.
        """
        self._folder, self._claim = folder, claim
        self._known: dict[str, tuple[int, int]] = {}  # pid and start of each worker whose page was seen
        self._missing_s = 0.0
        self._work: Future[Rescue] | None = None
        self._told = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="folder-guard")

    def look(self, pages: Sequence[PageView], now_s: float) -> bool:
        """Whether the folder, or a page of a living worker, is gone; begins to mend that."""
        seen = {page.worker: (page.pid, page.start_ticks) for page in pages}
        robbed = {name: who for name, who in self._known.items() if name not in seen and process_alive(*who)}
        self._known = {**robbed, **seen}
        if not robbed and self._folder.is_dir():
            self._missing_s, self._told = 0.0, "" if self._work is None else self._told
            return False
        self._missing_s = self._missing_s or now_s
        if self._work is None and now_s - self._missing_s >= SETTLED_S:
            self._missing_s = now_s - SETTLED_S + AGAIN_S  # of the next try
            self._work = self._thread.submit(self._rescue, dict(robbed))
        return True

    def done(self) -> Rescue | None:
        """Return what was done since the last call; a failure that was told already is not told again."""
        if self._work is None or not self._work.done():
            return None
        work, self._work = self._work, None
        rescue = work.result()
        if rescue.text == self._told:
            return None
        self._told = rescue.text
        return rescue

    def close(self) -> None:
        """Begin nothing any more; waits for what is under way."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    # --- on the thread --------------------------------------------------------------------------------------

    def _rescue(self, robbed: dict[str, tuple[int, int]]) -> Rescue:
        lost = f"snapshot.folder: {self._folder} was deleted while the run uses it"
        try:
            self._claim()
        except (PicotronError, OSError) as error:
            return Rescue(
                f"{lost}, and cannot be made anew: {error}; training goes on, but nothing is committed until"
                " it can"
            )
        pids = [pid for pid, _ in robbed.values()]
        for pid in pids:
            _signal(pid, signal.SIGSTOP)
        try:
            saved = sum(
                _copied(path, self._folder / name)
                for pid in pids
                for path, name in _deleted(pid, self._folder)
            )
        finally:
            for pid in pids:
                _signal(pid, signal.SIGKILL)
        workers = tuple(sorted(robbed))
        return Rescue(
            f"{lost}; it is made anew, {saved} slots are saved, and workers {', '.join(workers) or '(none)'}"
            " are started again",
            workers,
        )


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        log.debug("process %d has ended", pid)


def _deleted(pid: int, folder: Path) -> Iterable[tuple[Path, str]]:
    """Sealed slots of ``folder`` that a process still holds open, newest first: path, and name in there."""
    found = []
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            target = Path(os.readlink(path).removesuffix(DELETED))
            if target.parent == folder and target.suffix == SUFFIX and (header := read_header(path)):
                found.append((header.key, path, target.name))
        except (OSError, SlotError) as error:  # it has ended, or is not ours to look at
            log.warning("what process %d holds open cannot be read: %s", pid, error)
    return [(path, name) for _, path, name in sorted(found, reverse=True)]


def _copied(source: Path, target: Path) -> bool:
    """Copy a slot; False where there is no room for it, or it is there."""
    temporary = target.with_suffix(".new")
    if target.exists():
        return False
    try:
        with (
            source.open("rb") as read,
            os.fdopen(
                os.open(
                    temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
                ),
                "wb",
            ) as written,
        ):
            shutil.copyfileobj(read, written, 16 << 20)
        temporary.rename(target)
    except OSError as error:
        log.warning("slot %s is lost with its folder: %s", target.name, error)
        temporary.unlink(missing_ok=True)
        return False
    return True
