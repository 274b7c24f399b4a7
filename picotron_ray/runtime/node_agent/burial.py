"""Files of dead workers in a node's folder: slots that nothing needs any more, pages, notes, old specs.

Names of workers are never used again, so whatever dead workers leave would grow with every failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path

from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_pool import SUFFIX
from picotron_ray.checkpoint.snapshot.slot_sweep import owner, sweep
from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.runtime import telemetry_page
from picotron_ray.runtime.heartbeat import PageView
from picotron_ray.runtime.node_agent.specs import read_spec
from picotron_ray.runtime.ray_cluster import data_notes, kept_slots
from picotron_ray.runtime.worker.testimony import ASK, COLLECTIVES, STACKS

TESTIMONY = (STACKS, ASK, COLLECTIVES)
TESTIMONY_S = 3600.0
"""Age at which evidence of an end goes: it is there before a worker's page, and read after its death."""


class Burials:
    """Burials of one node, one at a time on a thread of their own: to free a large slot takes seconds.

    Whoever sends the heartbeats does not wait for them, or the node would count as lost with the first worker
    that dies.
    """

    def __init__(
        self,
        folder: Path,
        find_unburied: Callable[[], Sequence[PageView]],
        newest_spec: Callable[[], GenerationSpec | None],
    ) -> None:
        """Take what ``bury`` takes."""
        self._bury = partial(bury, folder, find_unburied, newest_spec)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="burial")
        self._last: Future[None] | None = None

    def begin(self) -> None:
        """Begin a burial unless one is under way; raises what ended the one before."""
        last = self._last
        if last is not None and not last.done():
            return
        self._last = self._thread.submit(self._bury)
        if last is not None:
            last.result()

    def settle(self, timeout_s: float) -> None:
        """Wait for the one that is under way, so long at most."""
        if self._last is not None:
            wait([self._last], timeout_s)

    def close(self) -> None:
        """Begin none any more; waits for none."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def bury(
    folder: Path,
    find_unburied: Callable[[], Sequence[PageView]],
    newest_spec: Callable[[], GenerationSpec | None],
) -> None:
    """Remove what dead workers left in a node's folder and nothing needs.

    Args:
        find_unburied: returns the pages of the workers that live, or whose exits have yet to be told. It is
            asked after the folder was listed: a worker that starts meanwhile has its page before anything
            else, and without that would be seen by nobody again.
        newest_spec: returns the newest generation that the node knows of; its spec stays, whoever wrote it.
    """
    listed = list(folder.iterdir())
    spared = find_unburied()
    names = {page.worker for page in spared}
    dead = [path for path in listed if _worker(path) not in (None, *names) and not _fresh(path)]
    if not dead:
        return
    newest, marker = newest_spec(), kept_slots.read_marker(folder)
    slots = [path for path in dead if path.suffix == SUFFIX]
    sweep(slots, names, newest_complete(spared, newest), marker["slots"] if marker else ())
    for path in dead:
        if path.suffix in (".page", data_notes.SUFFIX, telemetry_page.SUFFIX, *TESTIMONY) or (
            path.suffix == ".spec" and not _is_newest(path, newest)
        ):
            path.unlink(missing_ok=True)


def _worker(path: Path) -> str | None:
    """Name of the worker that a file is of; None where it is nobody's."""
    if path.suffix in (".page", ".spec", data_notes.SUFFIX, telemetry_page.SUFFIX, *TESTIMONY):
        return path.stem
    return owner(path) if path.suffix == SUFFIX else None


def _fresh(path: Path) -> bool:
    """Whether it is evidence that may still be asked for; most heartbeats find nothing else of the dead."""
    if path.suffix not in TESTIMONY:
        return False
    with suppress(FileNotFoundError):
        return time.time() - path.lstat().st_mtime <= TESTIMONY_S
    return True


def _is_newest(spec: Path, newest: GenerationSpec | None) -> bool:
    found = None if newest is None else read_spec(spec)
    return found is not None and newest is not None and found.id == newest.id


def newest_complete(pages: Sequence[PageView], newest: GenerationSpec | None) -> SlotKey | None:
    """Key of the newest state that is sealed on all ranks, as far as this node knows."""
    known: list[SlotKey] = [(page.term, page.n, page.complete) for page in pages if page.complete >= 0]
    if newest is not None:
        id_ = (newest.id.term, newest.id.n)
        known = [key for key in known if key[:2] >= id_]
        if newest.source.kind == "slots" and newest.source.generation is not None:
            known.append((newest.source.generation.term, newest.source.generation.n, newest.source.step))
    return max(known, default=None)
