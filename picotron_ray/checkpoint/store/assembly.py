"""Assembly of a manifest from the parts that nodes uploaded. Torch-free.

It is all of a commit whose cost grows with the state: parsing the parts, the checks, the look for chunks, and
the manifest's encoding. The coordinator has it done by another process where the state is large
(``runtime.run_storage.assembly_process``); what is left to it is the log (``commit.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice

from blake3 import blake3

from picotron_ray.checkpoint.storage.base import Storage, clock_s
from picotron_ray.checkpoint.storage.deadline import LISTED_AT_ONCE
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.commit_ledger import NewLedger, Read, joined, new_ledger, reader
from picotron_ray.checkpoint.store.manifest import (
    EVALUATION,
    ChunkInfo,
    Manifest,
    Segment,
    StoredShard,
    check,
)
from picotron_ray.checkpoint.store.outline import Outline
from picotron_ray.checkpoint.store.upload_part import UploadPart, unsure_chunks
from picotron_ray.errors import AlreadyExistsError, PartsGoneError, StorageError
from picotron_ray.layout.cover import needed
from picotron_ray.layout.layout import Layout

_THREADS = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """Manifest that is in storage, with all that it names; no entry names it yet.

    Fields:
        segments: of the ledger since the parent.
        intents: to be removed once it is committed.
        unproven: steps whose ledger lines are lost, in words; "" where none is.
        figures: of the evaluation at the commit's step, by name; empty where there was none.
    """

    key: str
    digest: str
    segments: tuple[Segment, ...]
    intents: tuple[str, ...]
    written_bytes: int
    unproven: str = ""
    figures: dict[str, float] = field(default_factory=dict)


class Assembler:
    """Assembly of one commit, in this process."""

    def __init__(
        self, storage: Storage, parts: Sequence[UploadPart], grace_s: float = 0.0, unproven: bool = False
    ) -> None:
        """
        Args:
            grace_s: of collection; 0: all chunks are looked for.
            unproven: ledger lines that nobody has are left out (`commit_ledger`).
        """
        self._storage, self._parts, self._grace_s = storage, parts, grace_s
        self._unproven = unproven
        self._made: tuple[Manifest, NewLedger] | None = None

    def assemble(self, parent: Outline | None) -> Outline:
        """Make the manifest; returns its outline, without a ledger. Raises as `assemble`."""
        self._made = assemble(self._parts, parent, reader(self._storage), self._unproven)
        manifest, _ = self._made
        return replace(Outline.of(manifest), ledger=())

    def store(self) -> Stored:
        """Look for the chunks that may be gone, and put the ledger's new segments and the manifest.

        Raises:
            PartsGoneError: chunks are gone.
            StorageError: the storage refused. StorageUnavailableError: calling again is safe.
        """
        assert self._made is not None, "nothing is assembled"
        manifest, new = self._made
        gone = missing_chunks(self._storage, self._unsure(manifest), len(manifest.chunks))
        if gone:
            raise PartsGoneError(
                f"{len(gone)} chunks of step {manifest.step} are gone, first {gone[0]}; upload it again"
            )
        manifest = _store_segments(self._storage, manifest, new)
        encoded = manifest.encode()
        return Stored(
            key=put_fresh(self._storage, manifest.key, encoded),
            digest=blake3(encoded).hexdigest(),
            segments=manifest.ledger[len(manifest.ledger) - len(new.segments) :],
            intents=tuple(part.intent for part in self._parts),
            written_bytes=sum(part.written_bytes for part in self._parts),
            unproven=", ".join(f"{a} to {b}" if a < b else f"{a}" for a, b in new.unproven),
            figures=dict(manifest.extra.get(EVALUATION, {})),
        )

    def _unsure(self, manifest: Manifest) -> dict[str, ChunkInfo]:
        young = self._grace_s and any(part.begun_s for part in self._parts)
        now_s = clock_s(self._storage) if young else 0.0
        unsure = unsure_chunks(self._parts, now_s, self._grace_s)
        return {address: info for address, info in manifest.chunks.items() if address in unsure}


def assemble(
    parts: Sequence[UploadPart],
    parent: Outline | None,
    read: Read = lambda _: (),
    unproven: bool = False,
) -> tuple[Manifest, NewLedger]:
    """Make one manifest of all parts, and what its ledger has beyond the parent's.

    Segments of that which are not stored yet have no key.

    Args:
        parent: the newest commit on the lineage, whose ledger this one continues.
        read, unproven: as for `new_ledger`.

    Raises:
        StorageError: parts of different steps, a state group without all fragments, a tensor that is not
            wholly covered.
        LedgerGoneError: ledger lines are missing since the parent.
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
    new = new_ledger(parts, (parent.step if parent else 0) + 1, read, unproven)
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


def missing_chunks(storage: Storage, chunks: Mapping[str, ChunkInfo], stored: int = 0) -> list[str]:
    """Addresses of chunks that are not in the store with their length.

    They are looked for by listings where those are fewer calls, `_THREADS` at a time counted as one.

    Args:
        stored: number of chunks that the store has at least.
    """
    keys = {chunk_key(address): info.size for address, info in chunks.items()}
    most = len(keys) // _THREADS * LISTED_AT_ONCE
    sizes = _listed(storage, keys, most) if most > stored else None
    if sizes is None:
        with ThreadPoolExecutor(max_workers=_THREADS) as threads:
            sizes = dict(zip(keys, threads.map(storage.size, keys), strict=True))
    return [key.rpartition("/")[2] for key, size in keys.items() if sizes.get(key) != size]


def _listed(storage: Storage, keys: Collection[str], most: int) -> dict[str, int | None] | None:
    """Sizes of objects from a listing of all chunks; None where there are more than ``most``."""
    found: dict[str, int | None] = {}
    for number, entry in enumerate(islice(storage.list("chunks/"), most + 1)):
        if number == most:
            return None
        if entry.key in keys:
            found[entry.key] = entry.size
    return found


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
    tensors: dict[str, list[StoredShard]] = {}
    for part in stored:
        tensors.setdefault(part.shard.name, []).append(part)
    kept = [held[at] for held in tensors.values() for at in needed([part.shard.box for part in held])]
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
