"""Cost of a commit at size: how it grows, the calls of storage it makes, what is parsed a second time."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.checkpoint.store import manifest as manifests
from picotron_ray.checkpoint.store.assembly import Assembler, assemble, missing_chunks
from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.commit import commit, commit_assembled
from picotron_ray.checkpoint.store.gc import collect
from picotron_ray.checkpoint.store.manifest import ChunkInfo, decode_manifest
from picotron_ray.checkpoint.store.outline import Outline, Outlines, decode_outline
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.upload_part import UploadPart, decode_part, unsure_chunks
from picotron_ray.config.schema.service import CheckpointConfig
from picotron_ray.errors import CorruptError, PartsGoneError
from tests.support.checkpoint.large_parts import CountedStorage, address, large_part

GRACE_S = 3600.0


def cpu_s(work: Callable[[], Any]) -> float:
    """CPU time, without Python's garbage collection: the process that assembles has none meanwhile."""
    times = []
    gc.disable()
    try:
        for _ in range(3):
            began = time.process_time()
            work()
            times.append(time.process_time() - began)
    finally:
        gc.enable()
    return min(times)


def test_a_part_travels_as_bytes() -> None:
    part = replace(
        large_part(1100, reused=(1, 2)), again=(address(3),), layout={}, extra={"a": [1]}, begun_s=2.5
    )
    assert decode_part(part.encode()) == part
    assert len(part.encode()) < 300 * 1100


def test_eight_times_the_chunks_take_less_than_sixteen_times_as_long() -> None:
    """From the parts' bytes to the manifest's, and back, of one tensor."""

    def whole_work(chunks: int) -> Callable[[], None]:
        data = large_part(chunks, cells=chunks).encode()

        def work() -> None:
            manifest, _ = assemble([decode_part(data)], None)
            assert len(manifest.chunks) == chunks
            ledger = tuple(replace(segment, key="k") for segment in manifest.ledger)
            decode_manifest("m", replace(manifest, ledger=ledger).encode())

        return work

    assert cpu_s(whole_work(8 * 1500)) < 16 * cpu_s(whole_work(1500))


class Run:
    """Run with a log and a storage that counts; commits of ``chunks`` each."""

    def __init__(self, chunks: int) -> None:
        self.storage, self.chunks = CountedStorage(), chunks
        self.log = RunLog(self.storage)
        self.log.claim_term("t")
        self.log.append("generation", {"term": 1, "n": 1, "source": {"generation": None, "step": 0}})
        self.outlines, self.step = Outlines(), 0

    def commit(self, reused: range = range(0), **words: Any) -> UploadPart:
        """Commit the next step of an upload that has just ended; the calls of that are what is counted."""
        step, known = self.step + 1, self.step
        begun = {"begun_s": self.storage.now_s - 60.0}
        part = large_part(self.chunks, step, reused=reused, known=known, **{**begun, **words})
        self.storage.hold(part)
        self.storage.calls.clear()
        self.commit_part(part)
        self.step = step
        return part

    def commit_part(self, part: UploadPart) -> None:
        assembler = Assembler(self.storage, [part], GRACE_S)
        commit_assembled(self.storage, self.log, (1, 1), assembler, self.outlines)


@pytest.mark.parametrize("chunks", [50, 4000])
def test_a_commit_asks_nothing_of_what_its_uploads_put(chunks: int) -> None:
    run = Run(chunks)
    for _ in range(2):
        run.commit()
        assert run.storage.calls["size"] == 0
        assert sum(run.storage.calls.values()) <= 8, run.storage.calls


def test_a_commit_asks_for_what_was_there_by_the_fewer_calls() -> None:
    run = Run(8000)
    run.commit()
    run.commit(reused=range(5))
    assert (run.storage.calls["size"], run.storage.calls["list"]) == (5, 1), "the clock's, and no chunk's"
    run.commit(reused=range(8000))
    assert (run.storage.calls["size"], run.storage.calls["list"]) == (0, 1 + 16), "all 16,000 are listed"
    run.commit(reused=range(7))
    assert run.storage.calls["size"] == 7


@pytest.mark.parametrize(
    ("age_s", "reused", "again", "asked"),
    [
        (60.0, (), (), set()),
        (60.0, (1,), (), {1}),
        (60.0, (), (2,), {2}),
        (60.0, (1,), (2,), {1, 2}),
        (GRACE_S, (), (), {0, 1, 2}),
        (GRACE_S / 2, (), (), {0, 1, 2}),
        (-1.0, (), (), {0, 1, 2}),
        (None, (), (), {0, 1, 2}),
    ],
)
def test_what_a_collection_may_have_taken_is_looked_for(
    age_s: float | None, reused: tuple[int, ...], again: tuple[int, ...], asked: set[int]
) -> None:
    """A save that slept, or put what was condemned, may find it gone; so may one of an unknown age."""
    begun_s = 0.0 if age_s is None else 5000.0 - age_s
    part = replace(large_part(3, reused=reused, begun_s=begun_s), again=tuple(map(address, again)))
    assert unsure_chunks([part], 5000.0, GRACE_S) == {address(at) for at in asked}
    assert unsure_chunks([part], 5000.0, 0.0) == set(part.chunks)


@pytest.mark.parametrize("gone", [3, 900])
def test_what_was_reused_and_is_gone_is_uploaded_again(gone: int) -> None:
    run = Run(1000)
    run.commit()
    part = large_part(1000, 2, reused=range(gone), known=1, begun_s=run.storage.now_s)
    run.storage.hold(part)
    del run.storage.objects[chunk_key(address(1))]
    run.storage.objects[chunk_key(address(2))] = b"cut"
    with pytest.raises(PartsGoneError, match=r"2 chunks of step 2 are gone"):
        run.commit_part(part)


def test_no_manifest_is_parsed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []

    def counted(key: str, data: bytes) -> Outline:
        parsed.append(key)
        return decode_outline(key, data)

    run = Run(40)
    run.outlines = Outlines(counted)
    config = CheckpointConfig(keep_last=3, gc_grace_s=0)
    for _ in range(5):
        run.commit()
        collect(run.storage, run.log, config, outlines=run.outlines)
    assert parsed == [], "it was assembled here"
    later = RunLog(run.storage)
    later.claim_term("next")
    later.append("generation", {"term": 2, "n": 1, "source": {"generation": {"term": 1, "n": 1}, "step": 5}})
    run.outlines = Outlines(counted)
    for _ in range(3):
        collect(run.storage, later, config, outlines=run.outlines)
    assert sorted(parsed) == [f"manifests/{step}-1-1.json" for step in (3, 4, 5)]
    kept = [e.key for e in run.storage.list("chunks/")]
    assert len(kept) == 3 * 40


@pytest.mark.parametrize("damage", [None, b"", b"{}", "flipped"])
def test_a_known_manifest_that_is_damaged_or_gone_is_given_up(damage: bytes | str | None) -> None:
    run = Run(5)
    for _ in range(2):
        run.commit()
    if damage == "flipped":
        data = bytearray(run.storage.objects["manifests/2-1-1.json"])
        data[len(data) // 2] ^= 1
        damage = bytes(data)
    if damage is None:
        del run.storage.objects["manifests/2-1-1.json"]
    else:
        assert isinstance(damage, bytes)
        run.storage.objects["manifests/2-1-1.json"] = damage
    report = collect(run.storage, run.log, CheckpointConfig(), outlines=run.outlines)
    assert len(report.damaged) == 1
    assert [entry.body["step"] for entry in run.log.commits()] == [1]


def test_outlines_are_bounded() -> None:
    one = Outline(1, 1, 1, addresses=bytes(32 * 100))
    outlines = Outlines(most_bytes=3 * one.cost_bytes)
    for digest in "abc":
        outlines.add(digest, one)
    storage = CountedStorage()
    body = {"manifest": "m", "step": 1, "term": 1, "n": 1}
    assert outlines.committed(storage, {**body, "digest": "a"}) is one
    outlines.add("d", one)
    for digest, known in (("a", True), ("b", False), ("c", True), ("d", True)):
        storage.calls.clear()
        if known:
            assert outlines.committed(storage, {**body, "digest": digest}) is one
        else:
            with pytest.raises(CorruptError, match="manifest m is missing"):
                outlines.committed(storage, {**body, "digest": digest})
        assert storage.calls["get"] == (not known)
    large = replace(one, addresses=bytes(32 * 1000))
    outlines.add("e", large)
    assert outlines.committed(storage, {**body, "digest": "e"}) is large, "the newest is always kept"


def test_an_outline_names_what_its_manifest_does() -> None:
    run = Run(30)
    part = run.commit()
    manifest = manifests.load_manifest(run.storage, "manifests/1-1-1.json")
    outline = run.outlines.committed(run.storage, run.log.commits()[0].body)
    assert outline == Outline.of(manifest)
    assert sorted(outline.chunk_keys()) == sorted(map(chunk_key, part.chunks))
    assert all(outline.names(chunk_key(a)) for a in part.chunks)
    assert outline.names(manifest.ledger[0].key)
    assert not outline.names("chunks/ab/junk")
    assert not outline.names("ledger/other")
    other = run.outlines
    with pytest.raises(CorruptError, match="the log says step 9"):
        Outlines().committed(run.storage, {**run.log.commits()[0].body, "step": 9})
    assert other.committed(run.storage, run.log.commits()[0].body).stored_bytes == sum(
        info.size for info in part.chunks.values()
    )


def test_a_store_of_more_chunks_than_worth_listing_is_asked_one_by_one() -> None:
    run = Run(16)
    part = run.commit()
    for at in range(5000):
        run.storage.objects[f"chunks/00/{10**6 + at:064x}"] = b""
    chunks = {a: ChunkInfo(info.size, info.size) for a, info in part.chunks.items()}
    run.storage.calls.clear()
    assert missing_chunks(run.storage, chunks) == []
    assert (run.storage.calls["size"], run.storage.calls["list"]) == (16, 3)


def test_a_whole_commit_in_one_call_looks_for_everything() -> None:
    run = Run(12)
    part = large_part(12)
    with pytest.raises(PartsGoneError, match=r"12 chunks of step 1 are gone"):
        commit(run.storage, run.log, [part])
