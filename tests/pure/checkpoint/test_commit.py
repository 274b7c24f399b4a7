"""Commits: names taken by others, phases, parts without a layout; what is read of one, in which order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from blake3 import blake3

from picotron_ray.checkpoint.storage.base import get_json
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store import commit_source
from picotron_ray.checkpoint.store.assembly import _without_repeats, assemble, missing_chunks, put_fresh
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.commit import commit
from picotron_ray.checkpoint.store.commit_source import CommitSource
from picotron_ray.checkpoint.store.intents import Intents
from picotron_ray.checkpoint.store.manifest import (
    ChunkInfo,
    Manifest,
    Segment,
    StoredShard,
    check,
    decode_manifest,
    load_manifest,
)
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.shard_sources import Piece, SlotSource
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.checkpoint.store.verify import CommitReport, Verifier, latest_good, read_ledger
from picotron_ray.errors import (
    AlreadyExistsError,
    CorruptError,
    NotFoundError,
    StorageError,
    StorageUnavailableError,
)
from picotron_ray.layout.shards import Box, Shard
from tests.support.checkpoint.checkpoint_kit import (
    generation,
    ledger,
    make_state,
    save,
    upload,
)


def test_a_save_tells_of_itself_before_it_looks(
    storage: LocalStorage, memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collection relies on it: an intent without chunks, the chunks, an intent that lists them."""
    puts: list[tuple[str, Any]] = []
    put = storage.put

    def noted(key: str, data: bytes) -> None:
        puts.append((key, json.loads(data) if key.startswith("intents/") else None))
        put(key, data)

    monkeypatch.setattr(storage, "put", noted)
    (part,) = upload(storage, memory_path / "s", make_state(1), (1, 1, 5))
    (address,) = part.chunks
    assert puts == [
        (part.intent, {"chunks": None}),
        (chunk_key(address), None),
        (part.intent, {"chunks": [address]}),
    ]

    def overwritten(source: SlotSource) -> None:
        raise CorruptError("overwritten")

    monkeypatch.setattr(SlotSource, "finish", overwritten)
    with pytest.raises(CorruptError):
        upload(storage, memory_path / "t", make_state(1), (1, 1, 6))
    key, content = puts[-1]
    assert key.startswith("intents/6-1-1-node0-")
    assert content == {"chunks": None}


def test_two_saves_of_other_slots_of_a_state_have_intents_of_their_own(
    storage: LocalStorage, memory_path: Path
) -> None:
    """The end of one would else set the other's chunks free to be collected."""
    parts = [upload(storage, memory_path / name, make_state(1), (1, 1, 5), nodes=2) for name in "st"]
    assert len({part.intent for part in (*parts[0], *parts[1])}) == 2, "asked for again it is the same"
    paths = sorted((memory_path / "s").iterdir())
    both = upload_slots(paths, storage, 1, 1, 5, owner="node0")
    assert both.intent not in {part.intent for part in parts[0]}


def test_intents_are_renewed_until_their_state_is_settled(storage: LocalStorage) -> None:
    intents = Intents(storage, renew_s=0.01)

    def until(done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 5
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def there() -> list[str]:
        return [entry.key for entry in storage.list("intents/")]

    intents.put("intents/a", (1, 1, 5), None)
    intents.put("intents/b", (1, 1, 6), ["y", "x"])
    for _ in range(2):  # collection took them for dead, or a commit was faster than a renewal
        storage.delete("intents/a")
        storage.delete("intents/b")
        until(lambda: there() == ["intents/a", "intents/b"])
    assert get_json(storage, "intents/b") == {"chunks": ["x", "y"]}
    intents.settle((1, 1, 5))
    until(lambda: there() == ["intents/b"])
    intents.drop("intents/b")
    until(lambda: intents._thread is None)
    assert there() == ["intents/b"], "its save has failed; it may be tried again"


@pytest.mark.parametrize("error", [StorageUnavailableError("down"), RuntimeError("can't start new thread")])
def test_a_call_that_fails_does_not_end_the_renewals(error: Exception) -> None:
    puts: list[str] = []

    def put(key: str, data: bytes) -> None:
        puts.append(key)
        if len(puts) in (2, 3):
            raise error

    intents = Intents(cast(Any, SimpleNamespace(put=put)), renew_s=0.01)
    intents.put("intents/a", (1, 1, 5), None)
    deadline = time.monotonic() + 5
    while len(puts) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    intents.drop("intents/a")


def test_a_thousand_names_are_tried() -> None:
    tried: list[str] = []

    def put_if_absent(key: str, data: bytes) -> None:
        tried.append(key)
        raise AlreadyExistsError(key)

    storage: Any = SimpleNamespace(where="there", put_if_absent=put_if_absent)
    with pytest.raises(StorageError) as caught:
        put_fresh(storage, "a/b.json", b"")
    assert str(caught.value) == "there: 1000 abandoned attempts at a/b.json; remove them"
    assert tried == ["a/b.json", *(f"a/b.{attempt}.json" for attempt in range(2, 1001))]


def test_a_phase_is_told_before_the_entry(storage: LocalStorage, log: RunLog, memory_path: Path) -> None:
    log.append("generation", generation(1, 1))
    parts = upload(storage, memory_path / "s", make_state(1), (1, 1, 5))
    told: list[Any] = []

    def phase(name: str) -> None:
        manifests = [entry.key for entry in storage.list("manifests/")]
        told.append((name, manifests, [entry.kind for entry in log.entries()]))

    done = commit(storage, log, parts, phase)
    assert told == [("commit", ["manifests/5-1-1.json"], ["term", "generation"])]
    assert done.seq == log.commits()[0].seq
    assert done.stored_bytes == done.written_bytes == sum(info.size for info in parts[0].chunks.values())


def test_parts_of_no_layout_have_no_groups(storage: LocalStorage, memory_path: Path) -> None:
    (part,) = upload(storage, memory_path / "s", make_state(1), (1, 1, 5))
    manifest, new = assemble([replace(part, layout={}, fragments=())], None)
    assert (manifest.layout, new.lines) == ({}, {1: list(ledger(1, 5))})
    for kept in (4, 3):
        with pytest.raises(StorageError, match=rf"no ledger line of step {kept + 1}, expected 1\.\.5"):
            assemble([replace(part, ledger=part.ledger[:kept])], None)


def test_chunks_are_missing_where_their_length_is_another() -> None:
    sizes = {"chunks/aa/aa": 5, "chunks/bb/bb": 4}
    storage: Any = SimpleNamespace(size=sizes.get)
    chunks = {address: ChunkInfo(5, 9) for address in ("aa", "bb", "cc")}
    assert missing_chunks(storage, chunks) == ["bb", "cc"]


def test_ledger_lines_after_a_step(storage: LocalStorage, log: RunLog, memory_path: Path) -> None:
    for step in (2, 5):
        done = save(storage, log, memory_path / str(step), make_state(step), (1, 1, step))
    manifest = load_manifest(storage, done.manifest, done.digest)
    assert [(segment.first, segment.last) for segment in manifest.ledger] == [(1, 2), (3, 5)]
    for after in range(7):
        assert read_ledger(storage, manifest, after) == list(ledger(after + 1, 5))


@pytest.mark.parametrize(
    ("spans", "problems"),
    [
        ([(1, 1), (2, 4)], []),
        ([(1, 4)], []),
        ([], ["the ledger ends at step 0, expected 4"]),
        ([(1, 3)], ["the ledger ends at step 3, expected 4"]),
        ([(2, 4)], ["ledger segment 2-4 begins at step 2, expected 1"]),
        ([(1, 2), (4, 4)], ["ledger segment 4-4 begins at step 4, expected 3"]),
        ([(1, 2), (2, 4)], ["ledger segment 2-4 begins at step 2, expected 3"]),
        (
            [(1, 2), (3, 2), (3, 4)],
            ["ledger segment 3-2 begins at step 3, expected 3"],
        ),
    ],
)
def test_a_ledger_has_no_gap(spans: list[tuple[int, int]], problems: list[str]) -> None:
    segments = tuple(Segment(f"{first}-{last}", first, last, "") for first, last in spans)
    manifest = Manifest(4, 1, 1, 0, {}, (), {}, segments)
    assert check(manifest) == problems


def test_chunks_are_fetched_a_few_ahead_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven chunks, of which the third is read twice; a chunk is kept until its last piece is read."""
    fetched: list[str] = []
    ends: list[dict[str, bool]] = []

    class Threads:
        def __init__(self, max_workers: int) -> None:
            assert max_workers == 4

        def submit(self, fetch: Any, storage: str, address: str, info: str) -> Future[bytes]:
            future: Future[bytes] = Future()
            future.set_result(fetch(storage, address, info))
            return future

        def shutdown(self, **options: bool) -> None:
            ends.append(options)

    def fetch_chunk(storage: str, address: str, info: str) -> bytes:
        assert (storage, info) == ("storage", f"info of {address}")
        fetched.append(address)
        return address.encode()

    monkeypatch.setattr(commit_source, "ThreadPoolExecutor", Threads)
    monkeypatch.setattr(commit_source, "fetch_chunk", fetch_chunk)
    monkeypatch.setattr(commit_source, "check_shard", lambda stored, raw: raw)
    storage: Any = "storage"
    manifest: Any = SimpleNamespace(chunks={address: f"info of {address}" for address in "abcdefg"})
    source = CommitSource(storage, manifest)
    shard: Any = None
    pieces = [Piece(shard, SimpleNamespace(chunk=address)) for address in "abccdefg"]
    source.prepare(pieces)
    seen = []
    for piece in pieces:
        assert source.read(piece) == piece.handle.chunk.encode()
        seen.append(("".join(fetched), "".join(source._fetched)))
    assert seen == [
        ("abcd", "bcd"),
        ("abcde", "cde"),
        ("abcdef", "cdef"),
        ("abcdef", "def"),
        ("abcdefg", "efg"),
        ("abcdefg", "fg"),
        ("abcdefg", "g"),
        ("abcdefg", ""),
    ]
    source.prepare(pieces[5:7])
    source.read(pieces[6])  # out of turn: it is fetched at once, and not again later
    assert "".join(fetched) == "abcdefg" + "fe"
    source.finish()
    assert ends == [{"wait": False, "cancel_futures": True}]


def test_boxes_that_others_cover_are_left_out() -> None:
    def part(name: str, first: int, last: int, chunk: str) -> StoredShard:
        return StoredShard(Shard(name, "uint8", (10,), Box((first,), (last - first,))), chunk, 0, "")

    stored = [
        part("w", 5, 10, "a"),
        part("w", 2, 6, "b"),  # covered by the larger ones
        part("w", 0, 5, "c"),
        part("w", 0, 5, "d"),  # another node's replica
        part("v", 0, 4, "e"),
        part("v", 0, 10, "f"),
        part("v", 0, 10, "g"),
        part("u", 3, 5, "h"),  # a tensor that nobody has whole
        part("u", 4, 6, "i"),
    ]
    assert "".join(kept.chunk for kept in _without_repeats(stored)) == "hifca"


ADDRESS = "ab" * 32


@pytest.mark.parametrize(
    ("start", "chunk", "problems"),
    [
        (0, ADDRESS, []),
        (5, ADDRESS, []),
        (6, ADDRESS, ["w: its bytes lie outside chunk abababababab"]),
        (-1, ADDRESS, ["w: its bytes lie outside chunk abababababab"]),
        (0, "cd" * 32, ["w: its bytes lie outside chunk cdcdcdcdcdcd"]),
    ],
)
def test_bytes_lie_in_a_chunk(start: int, chunk: str, problems: list[str]) -> None:
    """Four bytes, in a chunk of nine."""
    shard = Shard("w", "uint8", (4,), Box((0,), (4,)))
    manifest = Manifest(0, 1, 1, 0, {}, (StoredShard(shard, chunk, start, ""),), {ADDRESS: ChunkInfo(3, 9)})
    assert check(manifest) == problems
    others = {address: ChunkInfo(1, 1) for address in ("xyz", ADDRESS[1:])}
    odd = replace(manifest, chunks={**manifest.chunks, **others})
    assert check(odd) == [*problems, "'xyz' is no chunk address", f"{ADDRESS[1:]!r} is no chunk address"]


@pytest.mark.parametrize(
    ("tensor", "part", "why"),
    [
        ({"dtype": "int3"}, {}, "shard of w has the wrong rank or dtype"),
        ({"shape": [2, 2]}, {}, "shard of w has the wrong rank or dtype"),
        ({}, {"offset": [0, 0]}, "shard of w has the wrong rank or dtype"),
        ({}, {"size": []}, "shard of w has the wrong rank or dtype"),
        ({}, {"range": [0, 5]}, "shard of w has 5 bytes, expected 4"),
        ({}, {"size": [3], "range": [0, 3]}, None),
    ],
)
def test_a_shard_is_of_its_tensor(tensor: dict[str, Any], part: dict[str, Any], why: str | None) -> None:
    shard = Shard("w", "uint8", (4,), Box((0,), (4,)))
    manifest = Manifest(0, 1, 1, 0, {}, (StoredShard(shard, ADDRESS, 0, ""),), {ADDRESS: ChunkInfo(3, 9)})
    assert decode_manifest("m", manifest.encode()) == manifest
    value = json.loads(manifest.encode())
    value["tensors"][0].update(tensor)
    value["tensors"][0]["shards"][0].update(part)
    with pytest.raises(CorruptError) as caught:
        decode_manifest("m", json.dumps(value).encode())
    missing = "manifest m: w: (1,) at (3,) is missing of [4]"
    assert str(caught.value) == (f"manifest m is malformed: {ValueError(why)!r}" if why else missing)


def test_a_segment_that_is_not_asked_for_is_not_read(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    for step in (2, 5):
        done = save(storage, log, memory_path / str(step), make_state(step), (1, 1, step))
    manifest = load_manifest(storage, done.manifest, done.digest)
    storage.delete(manifest.ledger[0].key)
    assert read_ledger(storage, manifest, 2) == list(ledger(3, 5))
    with pytest.raises(NotFoundError):
        read_ledger(storage, manifest, 1)


def test_a_commit_whose_shard_is_another_does_not_verify(
    storage: LocalStorage, log: RunLog, memory_path: Path
) -> None:
    done = save(storage, log, memory_path / "s", make_state(5), (1, 1, 5))
    manifest = load_manifest(storage, done.manifest, done.digest)
    first, *others = manifest.shards
    wrong = replace(manifest, shards=(replace(first, digest="0" * 32), *others)).encode()
    storage.put("manifests/x.json", wrong)
    body = {**log.commits()[0].body, "manifest": "manifests/x.json", "digest": blake3(wrong).hexdigest()}
    log.append("commit", body)
    verifier = Verifier(storage)
    assert verifier.check(log.commits()[1]).problems == (
        f"chunk {chunk_key(first.chunk)}: {first.shard.name} does not match its digest",
    )
    assert Verifier(storage).check(log.commits()[0]).problems == ()


@pytest.mark.parametrize(
    ("problems", "said"),
    [(("a",), "a"), (("a", "b"), "a (and 1 more)"), (("a", "b", "c"), "a (and 2 more)")],
)
def test_why_no_commit_is_used(
    problems: tuple[str, ...],
    said: str,
    storage: LocalStorage,
    log: RunLog,
    memory_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(storage, log, memory_path / "s", make_state(5), (1, 1, 5))
    monkeypatch.setattr(Verifier, "check", lambda self, entry: CommitReport(entry, None, problems))

    def refused(step: int | None) -> str:
        with pytest.raises(StorageError) as caught:
            latest_good(storage, log, step)
        return str(caught.value).removeprefix(f"{storage.where} has ")

    why = f"that can be used: commit of step 5 is not used: {said}; commits are at steps [5]"
    assert refused(None) == f"no commit {why}"
    assert refused(5) == f"no commit of step 5 {why}"
    assert refused(7) == "no commit of step 7 that can be used; commits are at steps [5]"
