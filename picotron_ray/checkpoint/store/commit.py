"""Commit of a checkpoint: the nodes' parts become a manifest, and the log names it. Torch-free.

The coordinator calls ``commit``. Everything that a reader will need is durable before the log entry is
put: ledger segment, then manifest, then (after a look at every chunk) the entry. A crash in between leaves
objects that no entry names, which GC collects. It may do so on another thread meanwhile, so before the look a
commit says what it needs (``in_use.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from blake3 import blake3

from picotron_ray.checkpoint.storage.base import Storage
from picotron_ray.checkpoint.storage.deadline import deletions_given_up
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.commit_ledger import NewLedger, joined, new_ledger, with_cut_segments
from picotron_ray.checkpoint.store.in_use import InUse
from picotron_ray.checkpoint.store.lineage import commits_on
from picotron_ray.checkpoint.store.manifest import (
    ChunkInfo,
    Manifest,
    Segment,
    StoredShard,
    check,
    committed_manifest,
    segment_row,
)
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from picotron_ray.checkpoint.store.upload import UploadPart
from picotron_ray.errors import (
    AlreadyExistsError,
    CorruptError,
    PartsGoneError,
    StorageError,
    StorageUnavailableError,
)
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, uncovered, whole


@dataclass(frozen=True, slots=True)
class Committed:
    """Durable commit. ``written_bytes`` counts new chunks, ``stored_bytes`` all of them."""

    seq: int
    step: int
    manifest: str
    digest: str
    stored_bytes: int
    written_bytes: int


def commit(
    storage: Storage,
    log: RunLog,
    parts: Sequence[UploadPart],
    on_phase: Callable[[str], None] | None = None,
    in_use: InUse | None = None,
) -> Committed:
    """Commit what the nodes uploaded of one step.

    Args:
        on_phase: called with "commit" between the manifest and the log entry (scripted faults).
        in_use: shared with the collection that another thread may be at; None: there is none.

    Raises:
        FencedError: a newer term was claimed; nothing was committed.
        StorageError: parts do not make up the whole state, a chunk or ledger line is missing, or the
            storage refused. StorageUnavailableError: calling again is safe.
    """
    first = parts[0]
    parent = parent_of(storage, log, first.term, first.n)
    parts = with_cut_segments(storage, parts, (parent.step if parent else 0) + 1)
    manifest, new = assemble(parts, parent)
    needed = [manifest.key, *map(chunk_key, manifest.chunks)]
    with (in_use or InUse()).needed(needed) as going:
        leaving = going | deletions_given_up(storage)  # before the look: what goes after that was there
        done = _append(storage, log, manifest, new, leaving, on_phase)
    for part in parts:
        storage.delete(part.intent)
    return replace(done, written_bytes=sum(part.written_bytes for part in parts))


def _append(
    storage: Storage,
    log: RunLog,
    manifest: Manifest,
    new: NewLedger,
    leaving: Collection[str],
    on_phase: Callable[[str], None] | None,
) -> Committed:
    """Look for all chunks, store segments and manifest, and write the entry."""
    gone = missing_chunks(storage, manifest.chunks)
    if gone:
        raise PartsGoneError(
            f"{len(gone)} chunks of step {manifest.step} are gone, first {gone[0]}; upload it again"
        )
    manifest = _store_segments(storage, manifest, new)
    encoded = manifest.encode()
    key = put_fresh(storage, manifest.key, encoded)
    digest = blake3(encoded).hexdigest()
    _check_none_leaves(storage, leaving, manifest, key)
    if on_phase:
        on_phase("commit")
    body = {"term": manifest.term, "n": manifest.n, "step": manifest.step, "manifest": key, "digest": digest}
    # so that the ledger goes on where this manifest is damaged later
    rows = [segment_row(segment) for segment in manifest.ledger[len(manifest.ledger) - len(new.segments) :]]
    if rows:
        body |= {"segment": rows[0]} if len(rows) == 1 else {"segments": rows}
    seq = log.append("commit", body)
    return Committed(seq, manifest.step, key, digest, manifest.stored_bytes, 0)


def assemble(parts: Sequence[UploadPart], parent: Manifest | None) -> tuple[Manifest, NewLedger]:
    """Make one manifest of all parts, and what its ledger has beyond the parent's.

    Segments of that which are not stored yet have no key.

    Args:
        parent: the newest commit on the lineage, whose ledger this one continues.

    Raises:
        StorageError: parts of different steps, a state group without all fragments, a tensor that is not
            wholly covered, or ledger lines missing since the parent.
    """
    first = parts[0]
    for part in parts[1:]:
        if (part.term, part.n, part.step) != (first.term, first.n, first.step):
            raise StorageError(f"upload parts of steps {first.step} and {part.step} cannot be mixed")
    _check_fragments(parts)
    shards = _without_repeats(stored for part in parts for stored in part.shards)
    chunks: dict[str, ChunkInfo] = {}
    for part in parts:
        chunks.update(part.chunks)
    used = {stored.chunk for stored in shards}
    new = new_ledger(parts, (parent.step if parent else 0) + 1)
    manifest = Manifest(
        step=first.step,
        term=first.term,
        n=first.n,
        cursor=first.cursor,
        layout=first.layout,
        shards=tuple(shards),
        chunks={address: info for address, info in chunks.items() if address in used},
        ledger=(*(parent.ledger if parent else ()), *new.segments),
        extra=first.extra,
    )
    problems = check(manifest)
    if problems:
        raise StorageError(f"checkpoint of step {first.step} is incomplete: {problems[0]}")
    return manifest, new


_NOTHING = Manifest(step=0, term=0, n=0, cursor=0, layout={}, shards=(), chunks={}, ledger=(), extra={})


def parent_of(storage: Storage, log: RunLog, term: int, n: int) -> Manifest | None:
    """The manifest of the newest commit that generation (term, n) descends from, itself included.

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
    for entry in sorted(ancestors, key=lambda entry: (entry.body["step"], entry.seq), reverse=True):
        try:
            return _continued(committed_manifest(storage, entry.body), skipped[::-1], problem)
        except CorruptError as error:
            skipped, problem = [*skipped, entry], problem or error
    return _continued(_NOTHING, skipped[::-1], problem) if problem else None


def _continued(manifest: Manifest, entries: Sequence[Entry], problem: CorruptError | None) -> Manifest:
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


def missing_chunks(storage: Storage, chunks: dict[str, ChunkInfo]) -> list[str]:
    """Addresses of chunks that are not in the store with their length."""

    def there(item: tuple[str, ChunkInfo]) -> bool:
        return storage.size(chunk_key(item[0])) == item[1].size

    with ThreadPoolExecutor(max_workers=8) as threads:
        found = list(threads.map(there, chunks.items()))
    return [address for address, ok in zip(chunks, found, strict=True) if not ok]


def _check_none_leaves(storage: Storage, leaving: Collection[str], manifest: Manifest, key: str) -> None:
    """Raise StorageUnavailableError where an object of a commit may go yet, as its deletion hangs."""
    needed = {key, *map(chunk_key, manifest.chunks), *(segment.key for segment in manifest.ledger)}
    if at_risk := sorted(needed.intersection(leaving)):
        raise StorageUnavailableError(
            f"{storage.where}: a deletion of {at_risk[0]} hangs, which step {manifest.step} needs; it is not"
            " committed before that has ended; check the mount or network"
        )


def _check_fragments(parts: Sequence[UploadPart]) -> None:
    counts: dict[tuple[int, int], set[int]] = {}
    for group, index, count in (fragment for part in parts for fragment in part.fragments):
        counts.setdefault((group, count), set()).add(index)
    whole_groups = {group for (group, count), there in counts.items() if len(there) == count}
    layout = parts[0].layout
    groups = Layout.from_dict(layout).state_groups if layout else 0
    missing = sorted(set(range(groups)) - whole_groups)
    if missing:
        raise StorageError(
            f"checkpoint of step {parts[0].step}: state group {missing[0]} of {groups} was not uploaded"
            " as a whole"
        )


def _without_repeats(stored: Iterable[StoredShard]) -> list[StoredShard]:
    """Leave out boxes that larger ones cover already (replicas on other nodes)."""
    kept: list[StoredShard] = []
    boxes: dict[str, list[Box]] = {}
    done: dict[str, bool] = {}
    for part in sorted(stored, key=lambda part: -part.shard.box.numel):
        name = part.shard.name
        held = boxes.setdefault(name, [])
        if done.get(name) or not uncovered(part.shard.box, held):
            continue
        kept.append(part)
        held.append(part.shard.box)
        done[name] = not uncovered(whole(part.shard.global_shape), held)
    return sorted(kept, key=lambda part: (part.shard.name, part.shard.box.offset))


def _store_segments(storage: Storage, manifest: Manifest, new: NewLedger) -> Manifest:
    """Store those segments that have no key yet."""

    def stored(segment: Segment) -> Segment:
        if segment.key:
            return segment
        key = f"ledger/{manifest.term}-{manifest.n}-{segment.first}-{segment.last}.jsonl"
        return replace(segment, key=put_fresh(storage, key, joined(new.lines[segment.first])))

    return replace(manifest, ledger=tuple(stored(segment) for segment in manifest.ledger))


def put_fresh(storage: Storage, key: str, data: bytes) -> str:
    """Put under ``key`` or, where an abandoned attempt left other bytes there, ``key`` with a number."""
    stem, dot, suffix = key.rpartition(".")
    for attempt in range(1, 1001):
        name = key if attempt == 1 else f"{stem}.{attempt}{dot}{suffix}"
        try:
            storage.put_if_absent(name, data)
        except AlreadyExistsError:
            continue
        return name
    raise StorageError(f"{storage.where}: 1000 abandoned attempts at {key}; remove them")
