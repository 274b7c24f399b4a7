"""Objects that ask a reader for more memory or depth than the run promised: refused, and hardly read."""

from __future__ import annotations

import resource
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from picotron_ray.checkpoint.storage import base
from picotron_ray.checkpoint.storage.base import decode_json, get_bounded, get_json, get_or_none
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store import chunks
from picotron_ray.checkpoint.store.commit_source import fetch_chunk
from picotron_ray.checkpoint.store.manifest import ChunkInfo, Segment, load_manifest
from picotron_ray.checkpoint.store.run_log import RunLog, decode_entry, entry_key
from picotron_ray.errors import CorruptError, NotFoundError

BOMB_BYTES = 255 << 20
DEEP = (b'{"schema":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"x":' * 100_000)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path), "r1")


def peak_of(action: Callable[[], object]) -> int:
    """Most bytes that Python objects take at a time."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def refused(action: Callable[[], object], words: str) -> Callable[[], None]:
    def run() -> None:
        with pytest.raises(CorruptError, match=words):
            action()

    return run


@pytest.mark.parametrize("deep", DEEP, ids=["lists", "objects"])
def test_deep_json_is_corrupt_wherever_it_lies(storage: LocalStorage, deep: bytes) -> None:
    refused(lambda: decode_json("run.json", deep), r"^run\.json is not readable JSON")()
    refused(lambda: decode_entry(7, deep), "^log/00000007.json is not readable JSON")()
    storage.put("manifests/a.json", deep)
    refused(lambda: load_manifest(storage, "manifests/a.json"), "manifests/a.json is not readable JSON")()
    log = RunLog(storage)
    assert log.claim_term("one") == 1
    storage.put(entry_key(2), deep)
    later = RunLog(storage)
    assert later.claim_term("two") == 3, "above any term that the damaged entry may have held"
    assert len(later.complaints()) == 1


@pytest.mark.parametrize("depth", range(150, 1000, 50))
def test_no_depth_of_an_entry_ends_its_reader(depth: int) -> None:
    with pytest.raises(CorruptError):
        decode_entry(1, b'{"x":' * depth + b"1" + b"}" * depth)


def bomb(declared: bool) -> bytes:
    made = zstandard.ZstdCompressor(level=19, write_content_size=declared)
    return made.compress(bytes(BOMB_BYTES))


@pytest.mark.parametrize("declared", [True, False])
def test_a_small_chunk_that_becomes_large_is_not_decompressed(storage: LocalStorage, declared: bool) -> None:
    stored = bomb(declared)
    assert len(stored) < 64 << 10
    address = chunks.address_of(stored)
    storage.put(chunks.chunk_key(address), stored)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(
        lambda: fetch_chunk(storage, address, ChunkInfo(len(stored), 1000, "zstd")), "does not decompress"
    )()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10, "KiB"


@pytest.mark.parametrize("raw", [b"", b"x", bytes(100_000)])
def test_chunks_of_ours_decode(raw: bytes) -> None:
    for codec in chunks.CODECS:
        stored = chunks.encode(raw, codec)
        assert chunks.decode(chunks.address_of(stored), stored, codec, len(raw)) == raw
        refused(
            lambda: chunks.decode(chunks.address_of(stored), stored, codec, len(raw) + 1),  # noqa: B023
            "expected|does not decompress",
        )()


def test_an_object_longer_than_promised_is_not_read(storage: LocalStorage) -> None:
    storage.put("chunks/ab/" + "ab" * 32, bytes(32 << 20))
    info = ChunkInfo(1000, 1000)
    peak = peak_of(refused(lambda: fetch_chunk(storage, "ab" * 32, info), "more than the 1000 bytes"))
    assert peak < 1 << 20
    assert len(get_bounded(storage, "chunks/ab/" + "ab" * 32, 32 << 20)) == 32 << 20
    refused(lambda: get_bounded(storage, "chunks/ab/" + "ab" * 32, (32 << 20) - 1), "more than the")()
    with pytest.raises(NotFoundError):
        get_bounded(storage, "chunks/none", 10)


def test_json_objects_have_a_length_too(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.put("run.json", b'{"a": 1}')
    assert get_json(storage, "run.json", 8) == {"a": 1}
    assert get_or_none(storage, "run.json", 8) == b'{"a": 1}'
    assert get_or_none(storage, "gone.json") is None
    for read in (get_json, get_or_none):
        refused(lambda: read(storage, "run.json", 7), r"run\.json has more than the 7 bytes")()  # noqa: B023
    assert base.JSON_BYTES == 64 << 20


def test_a_ledger_segment_has_room_for_its_steps() -> None:
    assert Segment("k", 5, 5, "d").most_bytes * 3 == Segment("k", 5, 7, "d").most_bytes == 12 << 20
