"""Heads of slots: their tables are parsed when asked for, and by a service once for all readers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from picotron_ray.checkpoint.shard_service import server
from picotron_ray.checkpoint.shard_service.client import RemoteSlot, ShardClient
from picotron_ray.checkpoint.shard_service.server import ShardServer
from picotron_ray.checkpoint.snapshot import slot_reader
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, slot_bytes
from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.layout.shards import Shard, whole

SHARDS = tuple(Shard(f"layer{i}", "float32", (6,), whole((6,))) for i in range(3))
KEY = (1, 2, 5)


def write(folder: Path, name: str, seed: int = 0) -> None:
    draw = np.random.default_rng(seed)
    slot = SlotFile.create(folder / name, slot_bytes(SHARDS))
    slot.write(SlotHeader(*KEY, 0, ledger=("line",)), SHARDS, [draw.bytes(s.nbytes) for s in SHARDS])
    slot.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ShardServer]:
    write(tmp_path, "w.0.slot")
    with closing(ShardServer(tmp_path, "127.0.0.1", timeout_s=5.0)) as found:
        yield found


def test_a_listing_parses_no_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on the way of each recovery, in the thread that sends the heartbeats."""
    monkeypatch.setattr(slot_reader, "_shards", None)
    for name in ("w1.0.slot", "w2.0.slot"):
        write(tmp_path, name)
    assert [(path.name, header.key) for path, header in list_slots(tmp_path)] == [
        ("w1.0.slot", KEY),
        ("w2.0.slot", KEY),
    ]


def test_a_slots_table_is_parsed_once_for_all_who_open_it(
    service: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At size thousands of members open each slot; its table has thousands of rows."""
    parsed: list[int] = []
    real = slot_reader._shards
    monkeypatch.setattr(slot_reader, "_shards", lambda *parts: parsed.append(1) or real(*parts))

    def read() -> None:
        with closing(ShardClient(lambda: service.endpoint, timeout_s=5.0)) as peer:
            view = RemoteSlot(peer, "w.0.slot", KEY)
            assert sum(1 for _ in view.boxes(view.shards[2], SHARDS[2].box)) == 1

    def readers(count: int) -> int:
        """Parses by the service; each reader has one of its own."""
        parsed.clear()
        threads = [threading.Thread(target=read) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(parsed) - count

    assert readers(4) == 1
    assert readers(2) == 0
    write(tmp_path, "w.0.slot", seed=9)
    assert readers(2) == 1, "another state was written over it"


def test_tables_of_few_slots_are_kept(
    service: ShardServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_HEADS", 2)
    with closing(ShardClient(lambda: service.endpoint, timeout_s=5.0)) as peer:
        for number in range(5):
            name = f"w{number}.0.slot"
            write(tmp_path, name)
            RemoteSlot(peer, name, KEY)
    assert sorted(service._heads) == ["w3.0.slot", "w4.0.slot"]
