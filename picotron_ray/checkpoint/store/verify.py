"""Verification of commits, and the choice of the newest good one. Torch-free.

A commit is good where its manifest matches the digest in the log and every chunk and ledger segment that
it names matches its own. ``judge`` walks back from the newest commit and says in one line each why it
passed one over. Chunks found damaged are quarantined: later saves put those bytes again instead of
taking what lies there.

A coordinator that resumes does not read the state through: at 1 TB that takes longer than all else of a
restart. It looks at the log, the manifest and the sizes of chunks. Workers check each byte that they load,
and quarantine a chunk that fails: until it is put again, no commit with that chunk is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from blake3 import blake3

from picotron_ray.checkpoint.storage.base import Storage, encode_json, get_bounded
from picotron_ray.checkpoint.store.chunk_sizes import ChunkSizes
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.commit_source import check_shard, fetch_chunk
from picotron_ray.checkpoint.store.manifest import ChunkInfo, Manifest, Segment, committed_manifest
from picotron_ray.checkpoint.store.outline import Outline
from picotron_ray.checkpoint.store.run_log import Entry, RunLog
from picotron_ray.errors import CorruptError, NotFoundError, StorageError

_THREADS = 8
QUARANTINE = "quarantine/chunks/"


@dataclass(frozen=True, slots=True)
class CommitReport:
    """Verified commit and its problems; a good one has none."""

    entry: Entry
    manifest: Manifest | None
    problems: tuple[str, ...]
    bad_chunks: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return int(self.entry.body["step"])


@dataclass
class Verifier:
    """Verifier of one run's commits; a chunk that several commits share is read once."""

    storage: Storage
    _known: dict[str, str] = field(default_factory=dict)  # address -> problem, "" where good

    def check(self, entry: Entry) -> CommitReport:
        """Read everything that a commit names."""
        try:
            manifest = committed_manifest(self.storage, entry.body)
        except CorruptError as error:
            return CommitReport(entry, None, (str(error),))
        self._check_chunks(manifest)
        bad = [address for address in manifest.chunks if self._known[address]]
        problems = [self._known[address] for address in bad]
        problems += [line for line in (self._segment(s) for s in manifest.ledger) if line]
        return CommitReport(entry, manifest, tuple(problems), tuple(bad))

    def _check_chunks(self, manifest: Manifest) -> None:
        unknown = [address for address in manifest.chunks if address not in self._known]

        def look(address: str) -> str:
            try:
                raw = fetch_chunk(self.storage, address, manifest.chunks[address])
                for stored in manifest.shards:
                    if stored.chunk == address:
                        check_shard(stored, raw)
            except CorruptError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(max_workers=_THREADS) as threads:
            self._known.update(zip(unknown, threads.map(look, unknown), strict=True))

    def _segment(self, segment: Segment) -> str:
        try:
            data = get_bounded(self.storage, segment.key, segment.most_bytes)
        except NotFoundError:
            return f"ledger segment {segment.key} is missing"
        except CorruptError as error:
            return f"ledger segment {error}"
        if blake3(data).hexdigest() != segment.digest:
            return f"ledger segment {segment.key} does not match its digest"
        return ""


@dataclass
class SizeCheck:
    """Check of one run's commits that reads no chunk.

    It looks at manifests, at the sizes of chunks, and at what readers found damaged.
    """

    storage: Storage
    _sizes: ChunkSizes | None = None
    _damaged: frozenset[str] = frozenset()

    def check(self, entry: Entry) -> CommitReport:
        """Check that all of a commit is there."""
        try:
            manifest = committed_manifest(self.storage, entry.body)
        except CorruptError as error:
            return CommitReport(entry, None, (str(error),))
        if self._sizes is None:
            self._sizes = ChunkSizes(self.storage)
            self._damaged = frozenset(_address(found.key) for found in self.storage.list(QUARANTINE))
        sizes, chunks = self._sizes.of(manifest.chunks), manifest.chunks.items()
        problems = {a: line for a, info in chunks if (line := self._problem(a, info, sizes.get(a)))}
        return CommitReport(entry, manifest, tuple(problems.values()), tuple(problems))

    def _problem(self, address: str, info: ChunkInfo, size: int | None) -> str:
        key = chunk_key(address)
        if address in self._damaged:
            return f"chunk {key} was found damaged when it was read"
        if size is None:
            return f"chunk {key} is missing from {self.storage.where}"
        return "" if size == info.size else f"chunk {key} has {size} bytes, expected {info.size} (truncated)"


def _address(key: str) -> str:
    return key.rpartition("/")[2]


def verify_all(storage: Storage, log: RunLog) -> Iterator[CommitReport]:
    """Verify every commit that is not retired, newest first."""
    verifier = Verifier(storage)
    for entry in reversed(log.commits()):
        yield verifier.check(entry)


@dataclass(frozen=True, slots=True)
class GoodCommit:
    """Commit that verified.

    Fields:
        complaints: a line for every newer commit or log entry that did not verify.
    """

    entry: Entry
    manifest: Manifest
    complaints: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Judgement:
    """Outcome of a look for the newest good commit.

    Fields:
        good: that commit.
        damaged: those that were looked at and are not good, newest first.
        complaints: a line for each of them, and for each log entry that cannot be read.
        problem: a line where there are commits and none of them is good.
    """

    good: GoodCommit | None = None
    damaged: tuple[Entry, ...] = ()
    complaints: tuple[str, ...] = ()
    problem: str = ""


def latest_good(
    storage: Storage, log: RunLog, step: int | None = None, read_chunks: bool = True
) -> GoodCommit | None:
    """Find the newest commit in log order that verifies; None where the run has no commit at all.

    Args:
        step: take a commit of this step, and no other.
        read_chunks: False looks at their sizes alone.

    Raises:
        StorageError: there are commits, and none of them (of that step) is good.
    """
    found = judge(storage, log, step, read_chunks)
    if found.problem:
        raise StorageError(found.problem)
    return found.good


def judge(storage: Storage, log: RunLog, step: int | None = None, read_chunks: bool = True) -> Judgement:
    """Look for the newest commit in log order that verifies, and mark damaged chunks on the way.

    Args:
        step: take a commit of this step, and no other.
        read_chunks: False looks at their sizes alone.

    Raises:
        StorageError: the storage does not answer.
    """
    complaints, damaged = list(log.complaints()), list[Entry]()
    commits = [e for e in log.commits() if step is None or e.body["step"] == step]
    checker = Verifier(storage) if read_chunks else SizeCheck(storage)
    for entry in reversed(commits):
        report = checker.check(entry)
        if report.manifest is not None and not report.problems:
            good = GoodCommit(entry, report.manifest, tuple(complaints))
            return Judgement(good, tuple(damaged), good.complaints)
        quarantine(storage, report)
        damaged.append(entry)
        more = f" (and {len(report.problems) - 1} more)" if len(report.problems) > 1 else ""
        complaints.append(f"commit of step {report.step} is not used: {report.problems[0]}{more}")
    problem = _none_good(storage, log, step, complaints) if commits or step is not None else ""
    return Judgement(None, tuple(damaged), tuple(complaints), problem)


def _none_good(storage: Storage, log: RunLog, step: int | None, complaints: list[str]) -> str:
    steps = sorted({int(entry.body["step"]) for entry in log.commits()})
    wanted = "no commit" if step is None else f"no commit of step {step}"
    why = f": {complaints[-1]}" if complaints else ""
    return f"{storage.where} has {wanted} that can be used{why}; commits are at steps {steps}"


def quarantine(storage: Storage, report: CommitReport) -> None:
    """Mark a commit's damaged chunks, so that writers put those bytes again."""
    for address in report.bad_chunks:
        quarantine_chunk(storage, chunk_key(address), report.step)


def quarantine_chunk(storage: Storage, key: str, step: int) -> None:
    """Mark the chunk of a key as damaged, as a reader of the commit of ``step`` found it."""
    why = encode_json({"commit": step, "chunk": key})
    storage.put(f"{QUARANTINE}{_address(key)}", why)


def read_ledger(storage: Storage, manifest: Manifest | Outline, after: int = 0) -> list[str]:
    """All lines of `stream_ledger` in memory: of a long run ask for its last steps alone."""
    return list(stream_ledger(storage, manifest, after))


def stream_ledger(storage: Storage, manifest: Manifest | Outline, after: int = 0) -> Iterator[str]:
    """Read the ledger lines of the manifest's lineage of steps above ``after``, in order.

    No more than some segments are held at a time: a week of steps has gigabytes of lines.

    Raises:
        CorruptError, NotFoundError: naming the segment.
    """
    segments = [segment for segment in manifest.ledger if segment.last > after]
    with ThreadPoolExecutor(max_workers=_THREADS) as threads:
        for at in range(0, len(segments), _THREADS):
            for segment, lines in threads.map(partial(_segment_lines, storage), segments[at : at + _THREADS]):
                yield from lines[max(0, after + 1 - segment.first) :]


def _segment_lines(storage: Storage, segment: Segment) -> tuple[Segment, list[str]]:
    data = get_bounded(storage, segment.key, segment.most_bytes)
    if blake3(data).hexdigest() != segment.digest:
        raise CorruptError(f"ledger segment {segment.key} does not match its digest", where=segment.key)
    return segment, data.decode().splitlines()
