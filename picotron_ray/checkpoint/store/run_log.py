"""The run's log: one sequence of entries, one writer at a time, fenced by the storage itself.

``log/NNNNNNNN.json`` is written by conditional puts at last + 1. A coordinator starts by claiming a
term (an entry like the others). A writer whose put is refused reads what is there: an entry of its own
(a reply was lost) counts, a newer term means that it must stop for good (FencedError). So a writer that
was stopped before its commit and wakes up after the next term was claimed is refused by the store, not
by anybody's good manners.

Entries carry a digest. A damaged one is reported and skipped by readers; a claim then chooses a term
above any that the damaged entry may have held, and no writer appends after an entry that it cannot read.

Many entries lie in one object a second time (`log_blocks`), from which a fresh reader takes the old ones.

A generation names thousands of members, and a run has ever more generations. So of all but the newest one's
entry a reader holds no more than who writes and continues a history needs (`slimmed`).

Entry kinds and bodies:

- ``term``: ``{owner}``
- ``generation``: ``{term, n, source, nodes, members, ...}``, with at least ``{kind, step, generation:
  {term, n} | null}`` in source; its writer gives it the rest
- ``commit``: ``{term, n, step, manifest, digest}``; refused before its generation's entry is there
- ``retire``: ``{manifests: […]}``: commits that retention gave up; their chunks may be collected
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from blake3 import blake3

from picotron_ray.checkpoint.storage.base import (
    JSON_BYTES,
    Storage,
    StoredObject,
    decode_json,
    encode_json,
    get_bounded,
)
from picotron_ray.checkpoint.store.log_blocks import (
    numbers,
    read_block,
    stored_blocks,
    whole_blocks,
    write_block,
)
from picotron_ray.checkpoint.store.schema import refuse_newer
from picotron_ray.checkpoint.store.term_claim import Launch
from picotron_ray.errors import AlreadyExistsError, CorruptError, FencedError, NotFoundError, StorageError

SCHEMA = 1
Kind = Literal["term", "generation", "commit", "retire"]
_OF_THE_NEWEST = frozenset({"nodes", "members", "slots", "copies"})
"""Keys of a generation's body, at any depth (an earlier version's spec), that are empty in older ones."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of the log. ``term`` is its writer's; a commit's body names its generation's own.

    ``slim``: storage has more of the body (`slimmed`).
    """

    seq: int
    kind: Kind
    term: int
    writer: str
    nonce: str
    body: dict[str, Any] = field(default_factory=dict)
    slim: bool = field(default=False, compare=False)


def entry_key(seq: int) -> str:
    return f"log/{seq:08d}.json"


def encode_entry(entry: Entry) -> bytes:
    value = {
        "schema": SCHEMA,
        "seq": entry.seq,
        "kind": entry.kind,
        "term": entry.term,
        "writer": entry.writer,
        "nonce": entry.nonce,
        "body": entry.body,
    }
    return encode_json({**value, "digest": blake3(encode_json(value)).hexdigest()})


def decode_entry(seq: int, data: bytes) -> Entry:
    """Parse an entry; CorruptError where it is truncated, damaged or misplaced, else NewerSchemaError."""
    key = entry_key(seq)
    value = decode_json(key, data)
    digest = value.pop("digest", None)
    if digest != _digest(value):
        raise CorruptError(f"log entry {key} does not match its digest; it is skipped", where=key)
    refuse_newer(f"log entry {key}", value["schema"], SCHEMA)
    if value["schema"] != SCHEMA or value["seq"] != seq:
        saw = f"schema {value['schema']}, number {value['seq']}"
        raise CorruptError(f"log entry {key}: {saw}; expected schema {SCHEMA}, number {seq}", where=key)
    return Entry(seq, value["kind"], value["term"], value["writer"], value["nonce"], value["body"])


def slimmed(found: Entry | CorruptError) -> Entry | CorruptError:
    """Return a generation's entry with no members and slots, and any other one as it is."""
    if isinstance(found, CorruptError) or found.kind != "generation":
        return found
    body = _slim_body(found.body)
    return found if body == found.body else replace(found, body=body, slim=True)


def _slim_body(body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    return {key: [] if key in _OF_THE_NEWEST else _slim_body(value) for key, value in body.items()}


def _digest(value: dict[str, Any]) -> str:
    try:
        return blake3(encode_json(value)).hexdigest()
    except RecursionError:  # a little deeper than what can be read
        return ""


class RunLog:
    """Reader of the log, and its writer once a term is claimed."""

    def __init__(
        self, storage: Storage, before_put: Callable[[], None] | None = None, blocks: bool = True
    ) -> None:
        """Open the log; nothing is read yet.

        Args:
            before_put: called between choosing an entry's number and putting it (fault injection).
            blocks: False reads each entry where it lies, to see damage of which blocks know nothing.
        """
        self._storage = storage
        self._before_put = before_put
        self._writer = uuid.uuid4().hex
        self._read: dict[int, Entry | CorruptError] = {}
        self._last = 0
        self._newest = 0  # number of the newest generation's entry; older ones are slim
        self._use_blocks = blocks
        self._blocks: set[int] = set()  # read, or written by this writer
        self._claimed = 0  # number of this writer's term entry, once it has a term
        self.term = 0

    # --- reading -----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Read entries that are new since the last call."""
        listed = {seq: found for found in self._storage.list("log/") if (seq := _seq_of(found.key))}
        wanted = [seq for seq in listed if seq not in self._read]
        with ThreadPoolExecutor(max_workers=8) as threads:
            copied = self._copied(threads, whole_blocks(wanted), listed) if self._use_blocks else set()
            alone = [seq for seq in wanted if seq not in copied]
            for seq, found in zip(alone, threads.map(self._fetch_slim, alone), strict=True):
                self._hold(seq, found)
        self._last = max([self._last, *listed])
        newest = self._read.get(self._newest)
        if isinstance(newest, Entry) and newest.slim:
            self._hold(newest.seq, self._fetch(newest.seq))

    def read_on(self) -> None:
        """Read entries that are new since the last call, by a call for each and one more, however long it is.

        Writers put at last + 1 where nothing is, so no entry lies beyond a number that nobody has taken. The
        next one is asked for by a listing, which no client's cache of names that are not there answers (NFS).
        """
        while self._is_there(seq := self._last + 1):
            self._note(seq, self._fetch(seq))

    def _is_there(self, seq: int) -> bool:
        return any(found.key == entry_key(seq) for found in self._storage.list(entry_key(seq)))

    def entries(self) -> list[Entry]:
        """List the readable entries in order, without a refresh; ``complaints`` tells of the others."""
        return [entry for _, entry in sorted(self._read.items()) if isinstance(entry, Entry)]

    def complaints(self) -> list[str]:
        """List damaged and missing entries, a line each."""
        damaged = [str(entry) for _, entry in sorted(self._read.items()) if isinstance(entry, CorruptError)]
        gaps = [seq for seq in range(1, self._last) if seq not in self._read]
        return damaged + [f"log entry {entry_key(seq)} is missing" for seq in gaps]

    @property
    def identity(self) -> str:
        """Nonce of the first entry, which no other run of this name shares; "" where it cannot be read."""
        first = self._read.get(1)
        return first.nonce if isinstance(first, Entry) else ""

    def commits(self) -> list[Entry]:
        """List commit entries that no retire entry has given up, oldest first."""
        entries = self.entries()
        retired = {key for entry in entries if entry.kind == "retire" for key in entry.body["manifests"]}
        return [e for e in entries if e.kind == "commit" and e.body["manifest"] not in retired]

    def _fetch(self, seq: int) -> Entry | CorruptError:
        try:
            return decode_entry(seq, get_bounded(self._storage, entry_key(seq), JSON_BYTES))
        except CorruptError as error:
            return error

    def _fetch_slim(self, seq: int) -> Entry | CorruptError:
        return slimmed(self._fetch(seq))

    # --- blocks ------------------------------------------------------------------------------------

    def keep_blocks(self, most: int = 2) -> int:
        """Write at most so many of the blocks that storage does not have yet; returns their number.

        For the holder of a term, where nothing waits for it. Entries that cannot be read are in no block.

        Raises:
            StorageError: storage does not take it; the log is whole without.
        """
        written = 0
        for block in whole_blocks(range(1, self._last + 1)) if self.identity else []:
            if written == most:
                break
            lines = [] if block in self._blocks else self._lines(block)
            if not lines:
                continue
            write_block(self._storage, self.identity, block, lines)
            self._blocks.add(block)
            written += 1
        return written

    def _lines(self, block: int) -> list[bytes]:
        """Return the entries of a block as storage has them; none where one cannot be read."""
        lines = []
        for seq in numbers(block):
            found = self._read.get(seq)
            if isinstance(found, Entry) and found.slim:
                try:
                    found = self._fetch(seq)
                except NotFoundError:
                    return []
            if not isinstance(found, Entry):
                return []
            lines.append(encode_entry(found))
        return lines

    def _copied(
        self, threads: ThreadPoolExecutor, blocks: list[int], listed: dict[int, StoredObject]
    ) -> set[int]:
        """Hold the entries of blocks that storage has and that are to be believed; returns their numbers."""
        if not blocks:
            return set()
        if 1 in listed and 1 not in self._read:
            self._hold(1, self._fetch(1))
        stored = stored_blocks(self._storage, self.identity, blocks)
        held: set[int] = set()
        for part in threads.map(lambda block: self._block(block, stored[block], listed), stored):
            for seq, entry in part.items():
                self._hold(seq, entry)
            held.update(part)
        return held

    def _block(
        self, block: int, stored: StoredObject, listed: dict[int, StoredObject]
    ) -> dict[int, Entry | CorruptError]:
        lines = zip(numbers(block), read_block(self._storage, block, stored, listed), strict=False)
        try:
            found = {seq: slimmed(decode_entry(seq, line)) for seq, line in lines}
        except CorruptError:
            return {}
        if found:
            self._blocks.add(block)
        return found

    # --- writing -----------------------------------------------------------------------------------

    def claim_term(self, owner: str, launch: Launch | None = None) -> int:
        """Claim the next term and fence every older writer; returns the term.

        Raises:
            FencedError: another launch than ``launch`` claimed one in between (`Launch`).
        """
        while True:
            self.refresh()
            if launch is not None:
                launch.refuse_after_another(self.entries())
            damaged = sum(isinstance(entry, CorruptError) for entry in self._read.values())
            term = max((e.term for e in self.entries()), default=0) + 1 + damaged + self._gaps()
            entry = self._entry("term", term, {"owner": owner, **(launch.body if launch else {})})
            if self._put(entry):
                self.term, self._claimed = term, entry.seq
                return term

    def append(self, kind: Kind, body: dict[str, Any]) -> int:
        """Append an entry; returns its number once it is durable.

        After StorageUnavailableError the entry may be there or not; appending the same body again is
        safe (at worst it is there twice).

        Raises:
            FencedError: a newer term was claimed, or the log's end cannot be read: stop for good.
            StorageError: a commit whose generation has no entry.
        """
        self._check_fence()
        if kind == "commit":
            self._check_generation(body)
        while True:
            entry = self._entry(kind, self.term, body)
            if self._put(entry):
                return entry.seq
            self._check_fence()  # passed: an older writer's entry, or an earlier one of ours that came late

    def confirm(self) -> None:
        """Raise FencedError where the log holds a newer term than this writer's, as it is now."""
        self.read_on()
        self._check_fence()

    def witness(self) -> RunLog:
        """This log as a reader of its own, for another thread: it knows what is known here by now."""
        other = RunLog(self._storage)
        other._writer, other.term, other._claimed = self._writer, self.term, self._claimed
        other._last = self._last  # first: a writer notes an entry before its number
        other._read, other._newest = dict(self._read), self._newest
        return other

    def _check_fence(self) -> None:
        """Raise FencedError after the first entry since the claim that is of a newer term or unreadable.

        Everything read so far is judged. So a writer that was refused once, or that read the log past a
        newer claim, stays refused.
        """
        if not self.term:
            raise FencedError("no term is claimed; call claim_term first")
        for seq in sorted(seq for seq in self._read if seq > self._claimed):
            found = self._read[seq]
            foreign = isinstance(found, CorruptError) or (
                found.writer != self._writer and found.term >= self.term
            )
            if foreign:
                seen = f"term {found.term}" if isinstance(found, Entry) else "a damaged entry"
                error = FencedError(
                    f"log entry {seq} holds {seen}, this writer has term {self.term}: another coordinator has"
                    " taken over; stop"
                )
                error.owner = self._newest_owner()
                raise error

    def _newest_owner(self) -> str:
        """Name the claimer of the newest term; "" where no claim can be read."""
        return next((str(e.body.get("owner", "")) for e in reversed(self.entries()) if e.kind == "term"), "")

    def _entry(self, kind: Kind, term: int, body: dict[str, Any]) -> Entry:
        return Entry(self._last + 1, kind, term, self._writer, uuid.uuid4().hex, body)

    def _put(self, entry: Entry) -> bool:
        """Put an entry at its number; False where another one is there, which is read and noted."""
        if self._before_put:
            self._before_put()
        try:
            self._storage.put_if_absent(entry_key(entry.seq), encode_entry(entry))
        except AlreadyExistsError:
            try:
                self._note(entry.seq, self._fetch(entry.seq))
            except NotFoundError as error:
                raise StorageError(f"log entry {entry.seq} was there and is gone; who deletes it?") from error
            return False
        self._note(entry.seq, entry)
        return True

    def _note(self, seq: int, entry: Entry | CorruptError) -> None:
        self._hold(seq, entry)
        self._last = max(self._last, seq)

    def _hold(self, seq: int, found: Entry | CorruptError) -> None:
        """Remember an entry; of generations the newest one alone whole."""
        self._read[seq] = found
        if isinstance(found, Entry) and found.kind == "generation":
            older, self._newest = sorted((seq, self._newest))
            if 0 < older < self._newest:
                self._read[older] = slimmed(self._read[older])

    def _gaps(self) -> int:
        return sum(seq not in self._read for seq in range(1, self._last))

    def _check_generation(self, body: dict[str, Any]) -> None:
        wanted = (body["term"], body["n"])
        known = {(e.body["term"], e.body["n"]) for e in self.entries() if e.kind == "generation"}
        if wanted not in known:
            raise StorageError(
                f"commit of step {body['step']}: its generation {wanted[0]}.{wanted[1]} has no log entry yet;"
                " append that first"
            )


def _seq_of(key: str) -> int:
    """Number of a log key; 0 for anything else that lies there."""
    name = key.removeprefix("log/").removesuffix(".json")
    return int(name) if len(name) == 8 and name.isdigit() and entry_key(int(name)) == key else 0
