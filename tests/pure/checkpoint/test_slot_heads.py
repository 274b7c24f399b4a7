"""Heads of slots: an inventory parses no table; a shard service parses each slot's once for all clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.checkpoint.shard_service import server
from picotron_ray.checkpoint.shard_service.client import RemoteSlot, ShardClient
from picotron_ray.checkpoint.shard_service.server import ShardServer
from picotron_ray.checkpoint.snapshot import slot_reader
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, slot_bytes
from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.checkpoint.snapshot.slot_reader import open_slot
from picotron_ray.layout.shards import Shard, whole

SHARD = Shard("w", "float32", (6,), whole((6,)))


def write(folder: Path, number: int, step: int = 5) -> SlotFile:
    path = folder / f"w{number}.0.slot"
    slot = SlotFile.create(path, slot_bytes([SHARD]))
    slot.write(SlotHeader(1, 2, step, 0, ledger=("line",)), [SHARD], [content(number, step)])
    return slot


def content(number: int, step: int = 5) -> bytes:
    return np.full(6, 100 * step + number, dtype=np.float32).tobytes()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ShardServer]:
    with closing(ShardServer(tmp_path, "127.0.0.1", timeout_s=5.0)) as found:
        yield found


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each table that is parsed in this process."""
    found = list[int]()
    plain = slot_reader._shards

    def spy(*args: Any) -> Any:
        found.append(1)
        return plain(*args)

    monkeypatch.setattr(slot_reader, "_shards", spy)
    return found


def read(service: ShardServer, number: int, step: int = 5) -> bytes:
    """Contents of a slot, over a connection of its own."""
    with closing(ShardClient(lambda: service.endpoint, timeout_s=5.0)) as peer:
        far = RemoteSlot(peer, f"w{number}.0.slot", (1, 2, step))
        ((_, elements),) = far.boxes(far.shards[0], SHARD.box)
        return elements.tobytes()


def test_an_inventory_parses_no_table(tmp_path: Path, parsed: list[int]) -> None:
    """It is on the way of each recovery, in the thread that sends heartbeats."""
    for number in range(3):
        write(tmp_path, number)
    headers = [header for _, header in list_slots(tmp_path)]
    assert [(header.step, header.ledger) for header in headers] == [(5, ("line",))] * 3
    assert parsed == []
    assert open_slot(tmp_path / "w0.0.slot").shards[0].shard == SHARD
    assert parsed == [1]


def test_an_inventory_still_notices_a_table_that_does_not_match_its_seal(tmp_path: Path) -> None:
    write(tmp_path, 0)
    write(tmp_path, 1)
    path = tmp_path / "w1.0.slot"
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"float32"', b'"float16"', 1))
    assert [path.name for path, _ in list_slots(tmp_path)] == ["w0.0.slot"]


def test_a_service_parses_a_slot_once_for_all_its_clients(
    tmp_path: Path, service: ShardServer, parsed: list[int]
) -> None:
    write(tmp_path, 0)
    clients = 4
    for _ in range(clients):
        assert read(service, 0) == content(0)
    assert len(parsed) == clients + 1, "each client its copy, the service its own"


def test_a_slot_that_was_written_anew_is_not_taken_for_the_one_that_was_known(
    tmp_path: Path, service: ShardServer
) -> None:
    slot = write(tmp_path, 0)
    assert read(service, 0) == content(0)
    slot.write(SlotHeader(1, 2, 6, 0), [SHARD], [content(0, 6)])
    assert read(service, 0, 6) == content(0, 6)


class Slow(dict[Any, Any]):
    """A table in which whoever looks for its oldest entry is overtaken by others."""

    def __iter__(self) -> Iterator[Any]:
        found = super().__iter__()
        time.sleep(0.002)
        return found


def test_many_clients_at_once_are_served_and_only_the_last_slots_are_kept(
    tmp_path: Path, service: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MOST_HEADS", 2)
    service._heads, service._checked = Slow(), Slow()
    slots, found = 6, dict[tuple[int, int], bytes]()
    for number in range(slots):
        write(tmp_path, number)

    def client(of: int) -> None:
        for number in range(slots):
            found[of, number] = read(service, (of + number) % slots)

    threads = [threading.Thread(target=client, args=(of,)) for of in range(slots)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(i, j): content((i + j) % slots) for i in range(slots) for j in range(slots)}
    assert len(service._heads) == 2
