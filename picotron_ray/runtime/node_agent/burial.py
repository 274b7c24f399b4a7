"""Files of dead workers in a node's folder: slots that nothing needs any more, pages, old specs.

Names of workers are never used again, so whatever dead workers leave would grow with every failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from picotron_ray.checkpoint.snapshot.slot_format import SlotKey
from picotron_ray.checkpoint.snapshot.slot_pool import SUFFIX
from picotron_ray.checkpoint.snapshot.slot_sweep import owner, sweep
from picotron_ray.coordinator.messages import GenerationSpec
from picotron_ray.runtime.heartbeat import PageView
from picotron_ray.runtime.node_agent.specs import read_spec
from picotron_ray.runtime.ray_cluster import kept_slots
from picotron_ray.runtime.worker.testimony import ASK, COLLECTIVES, STACKS

TESTIMONY = (STACKS, ASK, COLLECTIVES)
TESTIMONY_S = 3600.0
"""Age at which evidence of an end goes: it is there before a worker's page, and read after its death."""


def bury(folder: Path, living: Sequence[PageView], newest_spec: Callable[[], GenerationSpec | None]) -> None:
    """Remove what dead workers left in a node's folder and nothing needs; their exits have been told.

    Args:
        living: pages of the workers that live.
        newest_spec: returns the newest generation that the node knows of; its spec stays, whoever wrote it.
    """
    names = {page.worker for page in living}
    dead = [path for path in folder.iterdir() if _worker(path) not in (None, *names) and not _fresh(path)]
    if not dead:
        return
    newest, marker = newest_spec(), kept_slots.read_marker(folder)
    sweep(folder, names, newest_complete(living, newest), marker["slots"] if marker else ())
    for path in dead:
        if path.suffix in (".page", *TESTIMONY) or (path.suffix == ".spec" and not _is_newest(path, newest)):
            path.unlink(missing_ok=True)


def _worker(path: Path) -> str | None:
    """Name of the worker that a file is of; None where it is nobody's."""
    if path.suffix in (".page", ".spec", *TESTIMONY):
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


def newest_complete(living: Sequence[PageView], newest: GenerationSpec | None) -> SlotKey | None:
    """Key of the newest state that is sealed on all ranks, as far as this node knows."""
    known: list[SlotKey] = [(page.term, page.n, page.complete) for page in living if page.complete >= 0]
    if newest is not None:
        id_ = (newest.id.term, newest.id.n)
        known = [key for key in known if key[:2] >= id_]
        if newest.source.kind == "slots" and newest.source.generation is not None:
            known.append((newest.source.generation.term, newest.source.generation.n, newest.source.step))
    return max(known, default=None)
