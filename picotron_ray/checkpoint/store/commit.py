"""Commit of a checkpoint: the nodes' parts become a manifest, and the log names it. Torch-free.

The coordinator calls ``commit``. Everything that a reader will need is durable before the log entry is
put: ledger segment, then manifest, then (after a look at the chunks) the entry. A crash in between leaves
objects that no entry names, which GC collects. It may do so on another thread meanwhile, so before the look a
commit says what it needs (``in_use.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.deadline import deletions_given_up
from picotron_ray.checkpoint.store.assembly import Assembler, Stored
from picotron_ray.checkpoint.store.best import FIGURES
from picotron_ray.checkpoint.store.deletion import delete_settled
from picotron_ray.checkpoint.store.in_use import InUse
from picotron_ray.checkpoint.store.lineage import commits_on
from picotron_ray.checkpoint.store.manifest import Segment, segment_row
from picotron_ray.checkpoint.store.outline import Outline, Outlines
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from picotron_ray.checkpoint.store.upload_part import UploadPart
from picotron_ray.errors import CorruptError, StorageUnavailableError


@dataclass(frozen=True, slots=True)
class Committed:
    """Durable commit. ``written_bytes`` counts new chunks, ``stored_bytes`` all of them.

    ``unproven``: steps whose ledger lines are lost, in words. ``intents``: of its saves, to be deleted.
    """

    seq: int
    step: int
    manifest: str
    digest: str
    stored_bytes: int
    written_bytes: int
    unproven: str = ""
    intents: tuple[str, ...] = ()


class Assembling(Protocol):
    """Assembly of one commit, in this process (`Assembler`) or another one."""

    def assemble(self, parent: Outline | None) -> Outline: ...

    def store(self) -> Stored: ...


def commit(
    storage: Storage,
    log: RunLog,
    parts: Sequence[UploadPart],
    on_phase: Callable[[str], None] | None = None,
    in_use: InUse | None = None,
    grace_s: float = 0.0,
    unproven: bool = False,
) -> Committed:
    """Commit what the nodes uploaded of one step, with all of the work in this process.

    Args:
        on_phase: called with "commit" between the manifest and the log entry (scripted faults).
        in_use: shared with the collection that another thread may be at; None: there is none.
        grace_s: of collection; 0: all chunks are looked for.
        unproven: ledger lines that nobody has are left out (`commit_ledger`).

    Raises:
        FencedError: a newer term was claimed; nothing was committed.
        LedgerGoneError: a ledger line is missing.
        StorageError: parts do not make up the whole state, a chunk is missing, or the storage refused.
            StorageUnavailableError: calling again is safe.
    """
    writer = parts[0].term, parts[0].n
    assembler = Assembler(storage, parts, grace_s, unproven)
    done = commit_assembled(storage, log, writer, assembler, Outlines(), on_phase, in_use)
    delete_settled(storage, deque(done.intents))
    return done


def commit_assembled(
    storage: Storage,
    log: RunLog,
    writer: tuple[int, int],
    assembling: Assembling,
    outlines: Outlines,
    on_phase: Callable[[str], None] | None = None,
    in_use: InUse | None = None,
    in_order: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> Committed:
    """Commit what generation ``writer`` has uploaded; as `commit`, with the assembly done elsewhere.

    The intents are left to the caller (`deletion.delete_settled`): there is one a node.

    Args:
        outlines: of manifests that are known already; others, and this one, are added.
        in_order: does a short piece of work with the log where its writer does all of it, and returns its
            result; everything that takes long is done in the calling thread.
    """
    parent = parent_of(storage, in_order(log.witness), *writer, outlines)
    outline = assembling.assemble(parent)
    with (in_use or InUse()).needed([outline.key, *outline.chunk_keys()]) as going:
        leaving = going | deletions_given_up(storage)  # before the look: what goes after that was there
        stored = assembling.store()
        outline = replace(outline, ledger=(*(parent.ledger if parent else ()), *stored.segments))
        _check_none_leaves(storage, leaving, outline, stored.key)
        if on_phase:
            on_phase("commit")
        seq: int = in_order(partial(log.append, "commit", _body(outline, stored)))
    outlines.add(stored.digest, outline)
    known = stored.key, stored.digest, outline.stored_bytes, stored.written_bytes
    return Committed(seq, outline.step, *known, stored.unproven, stored.intents)


def _body(outline: Outline, stored: Stored) -> dict[str, Any]:
    """Body of the entry; with the ledger's new segments, in case that this manifest is damaged later."""
    body: dict[str, Any] = {"term": outline.term, "n": outline.n, "step": outline.step}
    body |= {"manifest": stored.key, "digest": stored.digest}
    rows = [segment_row(segment) for segment in stored.segments]
    if rows:
        body |= {"segment": rows[0]} if len(rows) == 1 else {"segments": rows}
    body |= {FIGURES: stored.figures} if stored.figures else {}
    return body | ({"unproven": stored.unproven} if stored.unproven else {})


_NOTHING = Outline(step=0, term=0, n=0)


def parent_of(
    storage: Storage, log: RunLog, term: int, n: int, outlines: Outlines | None = None
) -> Outline | None:
    """The outline of the newest commit that generation (term, n) descends from, itself included.

    Where newer ones are damaged, or were given up by retention, it is the newest one that can be read, as if
    it were of the last damaged one's step: with the ledger continued by the segments that the log's entries
    name. Where none can be read, the log alone tells the ledger. So no damaged commit ends later ones.

    Raises:
        CorruptError: one cannot be read, and an entry of an older version names no segment.
    """
    entries = log.entries()
    ever = [entry for entry in entries if entry.kind == "commit"]  # collection gives damaged ones up
    ancestors = commits_on(entries, ever, (term, n))
    skipped: list[Entry] = []
    problem: CorruptError | None = None
    outlines = outlines or Outlines()
    for entry in sorted(ancestors, key=lambda entry: (entry.body["step"], entry.seq), reverse=True):
        try:
            return _continued(outlines.committed(storage, entry.body), skipped[::-1], problem)
        except CorruptError as error:
            skipped, problem = [*skipped, entry], problem or error
    return _continued(_NOTHING, skipped[::-1], problem) if problem else None


def _continued(manifest: Outline, entries: Sequence[Entry], problem: CorruptError | None) -> Outline:
    """A manifest with the ledger segments of later commits, oldest first, that ``problem`` has taken."""
    ledger, step = list(manifest.ledger), manifest.step
    for body in (entry.body for entry in entries):
        if body["step"] == step:  # of the same state, by another generation
            continue
        rows = body.get("segments") or [body[key] for key in ("segment",) if key in body]
        if not rows or rows[0][1] != step + 1:
            raise problem or CorruptError(f"the ledger does not go on at step {step + 1}")
        ledger += [Segment(*row) for row in rows]
        step = ledger[-1].last
    return replace(manifest, step=step, ledger=tuple(ledger))


def _check_none_leaves(storage: Storage, leaving: Collection[str], outline: Outline, key: str) -> None:
    """Raise StorageUnavailableError where an object of a commit may go yet, as its deletion hangs."""
    if at_risk := sorted(gone for gone in leaving if gone == key or outline.names(gone)):
        raise StorageUnavailableError(
            f"{storage.where}: a deletion of {at_risk[0]} hangs, which step {outline.step} needs; it is not"
            " committed before that has ended; check the mount or network"
        )
