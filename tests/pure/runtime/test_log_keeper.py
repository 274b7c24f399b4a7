"""Keeping a node's lines: what its processes write is read once, with its place, and sent to storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from picotron_ray.checkpoint.storage.base import StoredObject
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.errors import StorageUnavailableError
from picotron_ray.observability.logs.lines import Place, decode, head
from picotron_ray.observability.logs.pages import read_page
from picotron_ray.observability.logs.query import Query
from picotron_ray.runtime import log_shipping, log_sources
from picotron_ray.runtime.heartbeat import process_start_ticks
from picotron_ray.runtime.log_keeper import LogKeeper
from picotron_ray.runtime.log_shipping import (
    DEAD_KEPT,
    GONE_S,
    LogShipping,
    dead_key,
    drop_oldest_nodes,
    free_slots,
    node_key,
    stored_lines,
    stored_nodes,
)
from picotron_ray.runtime.log_sources import GrowingFile
from picotron_ray.runtime.ray_cluster import log_folders
from picotron_ray.runtime.ray_cluster.log_folders import COORDINATOR

RUN, NODE = "night", "abcdef0123456789ff"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return log_folders.log_folder(RUN, NODE)


def note(folder: Path, name: str, out: Path, err: Path, pid: int = 0) -> None:
    """Leave the note of a process, as it does by itself."""
    pid = pid or os.getpid()
    value = {"name": name, "pid": pid, "start_ticks": process_start_ticks(pid)}
    value |= {"paths": {"stdout": str(out), "stderr": str(err)}}  # type: ignore[dict-item]
    (folder / "sources").mkdir(parents=True, exist_ok=True)
    (folder / "sources" / f"{name}-{pid}.json").write_text(json.dumps(value))


def kept(folder: Path) -> list[str]:
    return [
        f"{entry['level']} {entry['rank']} {entry['step']} {entry['worker']}: {entry['text']}"
        for entry in read_page(folder, Query()).entries
    ]


def test_what_a_process_writes_is_kept_once_with_its_place(folder: Path, tmp_path: Path) -> None:
    out, err = tmp_path / "w.out", tmp_path / "w.err"
    out.write_text(":job_id:01\n:actor_name:WorkerActor\nprinted\nhal")
    err.write_text("[W] C++\n")
    note(folder, "w0", out, err)
    place = [Place("1.1", 3, 17)]
    keeper = LogKeeper(RUN, NODE, folder, lambda: {os.getpid(): place[0]})
    keeper.look()
    assert sorted(kept(folder)) == ["stderr 3 17 w0: [W] C++", "stdout 3 17 w0: printed"]
    place[0] = Place("1.1", 3, 18)
    with out.open("a") as file:
        file.write(f"f\n{head(time.time() + 9, 'ERROR', 'x', Place('1.1', 3, 12))}it failed\n")
    keeper.look()
    keeper.look()
    assert kept(folder)[2:] == ["stdout 3 18 w0: half", "error 3 12 w0: it failed"]
    again = LogKeeper(RUN, NODE, folder)
    again.begin()
    again.close()
    assert len(kept(folder)) == 4, "the agent's next process reads on"


def test_secrets_of_the_environment_are_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-7654321")
    out = tmp_path / "w.out"
    out.write_text("with canary-7654321\n")
    note(folder, "w0", out, tmp_path / "none")
    LogKeeper(RUN, NODE, folder).look()
    assert kept(folder) == ["stdout None None w0: with ***"]


def test_lines_of_a_dead_process_are_read_to_the_end_then_it_is_forgotten(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "w.out"
    words = "import time; print('up', flush=True); time.sleep(60)"
    with out.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", words], stdout=file)
    try:
        note(folder, "w0", out, tmp_path / "none", process.pid)
        keeper = LogKeeper(RUN, NODE, folder)
        keeper.look()
        process.kill()
        process.wait()
    finally:
        process.kill()
    with out.open("a") as file:
        file.write("last words\n")
    monkeypatch.setattr(log_sources, "DRAINED_S", -1.0)
    keeper.look()
    assert kept(folder)[-1] == "stdout None None w0: last words"
    assert not list((folder / "sources").iterdir())


def test_a_process_that_writes_faster_than_it_is_read_costs_lines_that_are_counted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_sources, "MOST_READ", 1000)
    out = tmp_path / "w.out"
    out.write_text("".join(f"{number:09d}\n" for number in range(1000)))
    note(folder, "w0", out, tmp_path / "none")
    keeper = LogKeeper(RUN, NODE, folder)
    keeper.look()
    found = kept(folder)
    assert found[-1].endswith("000000999")
    assert keeper.store.lost + keeper.store.lines == 1000
    assert found[0] == f"warning None None None: {keeper.store.lost} lines of this node are missing here"


def test_a_file_that_is_rotated_is_read_from_its_begin(tmp_path: Path) -> None:
    path = tmp_path / "w.out"
    path.write_text("one\n")
    file = GrowingFile(path)
    assert file.read().lines == ["one"]
    path.rename(tmp_path / "w.out.1")
    path.write_text("a longer line\n")
    assert file.read().lines == ["a longer line"]
    endless = tmp_path / "endless.out"
    endless.write_text("x" * log_sources.MOST_LINE)
    assert len(GrowingFile(endless).read().lines[0]) == log_sources.MOST_LINE, (
        "a line without an end is one, once it is long"
    )


def test_folders_of_nodes_that_are_gone_are_bounded_and_living_ones_spared(folder: Path) -> None:
    root = folder.parent
    for number in range(4):
        dead = root / f"{number:016d}"
        dead.mkdir(parents=True)
        (dead / "000000000001.jsonl").write_bytes(b"x" * 1000)
        os.utime(dead / "000000000001.jsonl", (number, number))
    log_folders.sign(root / f"{0:016d}", 0.0)
    log_folders.remove_old(RUN, folder, most_bytes=1500)
    assert sorted(path.name[-1] for path in root.iterdir()) == ["0", "3"]


def test_lines_of_an_earlier_run_of_the_name_are_not_this_ones(folder: Path) -> None:
    for name, identity, at in (("a", "old", 1), ("b", "new", 2), ("c", "", 3)):
        path = log_folders.log_folder(RUN, name)
        log_folders.learn(path, identity) if identity else path.mkdir(parents=True)
        (path / "000000000001.jsonl").touch()
        os.utime(path / "000000000001.jsonl", (at, at))
    assert set(log_folders.known_nodes(RUN)) == {"b", "c"}
    assert log_folders.known_nodes("another") == {}


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "runs"), RUN)


def keep_lines(folder: Path, tmp_path: Path, count: int = 3) -> LogKeeper:
    out = tmp_path / "w.out"
    out.write_text("".join(f"line {number}\n" for number in range(count)))
    note(folder, "w0", out, tmp_path / "none")
    keeper = LogKeeper(RUN, NODE, folder)
    keeper.look()
    return keeper


def texts(lines: list[bytes]) -> list[str]:
    return [entry["text"] for line in lines if (entry := decode(line))]


def test_a_dead_workers_lines_and_the_nodes_newest_go_to_storage(
    folder: Path, tmp_path: Path, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_shipping, "SETTLE_S", 0.0)
    keeper = keep_lines(folder, tmp_path)
    shipping = LogShipping(folder, node_key(NODE), lambda: storage, lambda: keeper.store.lines)
    shipping.begin()
    assert shipping.send_worker("w0", dead_key(5))
    shipping.close()
    found = stored_lines(storage)
    assert {key: texts(lines) for key, lines in found.items()} == {
        "logs/dead/05.jsonl.zst": ["line 0", "line 1", "line 2"],
        node_key(NODE): ["line 0", "line 1", "line 2"],
    }
    slots = free_slots(storage)
    taken = [next(slots) for _ in range(DEAD_KEPT)]
    assert taken[-1] == 5, "the one used last is used again last"
    assert next(slots) == taken[0], "their number is bounded"


def test_storage_that_fails_costs_lines_and_no_more(folder: Path, tmp_path: Path) -> None:
    class Away:
        def put(self, key: str, data: bytes) -> None:
            raise StorageUnavailableError("away")

    keeper = keep_lines(folder, tmp_path)
    shipping = LogShipping(folder, node_key(NODE), Away, lambda: keeper.store.lines)  # type: ignore[arg-type]
    for _ in range(log_shipping.MOST_WAITING):
        assert shipping.send_worker("w0", dead_key(1))
    assert not shipping.send_worker("w0", dead_key(1)), "a bounded number waits"
    assert shipping.dropped == 1
    assert not shipping._put("logs/x", [])
    assert shipping.dropped == 2


def test_no_more_than_a_mebibyte_of_a_worker_is_sent(
    folder: Path, tmp_path: Path, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_shipping, "MOST_BYTES", 2000)
    keeper = keep_lines(folder, tmp_path, 100)
    shipping = LogShipping(folder, node_key(NODE), lambda: storage, lambda: keeper.store.lines)
    shipping._send_node()
    (lines,) = stored_lines(storage).values()
    assert sum(map(len, lines)) <= 2000
    assert texts(lines)[-1] == "line 99"


def test_lines_of_the_nodes_that_wrote_longest_ago_are_removed(
    tmp_path: Path, folder: Path, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines come and go for months: the coordinator keeps those of the newest."""
    for number in range(6):
        storage.put(node_key(f"{number}" * 16), b"")
        os.utime(tmp_path / "runs" / RUN / node_key(f"{number}" * 16), (number * GONE_S, number * GONE_S))
    storage.put(dead_key(3), b"")
    monkeypatch.setattr(log_shipping, "DELETE_BATCH", 2)
    assert drop_oldest_nodes(storage, kept=3) == 3
    assert stored_nodes(storage) == ["3" * 16, "4" * 16, "5" * 16]
    assert drop_oldest_nodes(storage, kept=1) == 1
    assert stored_nodes(storage) == ["4" * 16, "5" * 16], "the first wrote hours ago, and may write again"
    keeper = keep_lines(folder, tmp_path)
    of_node, of_coordinator = (
        LogShipping(folder, node_key(who), lambda: storage, lambda: keeper.store.lines)
        for who in (NODE, COORDINATOR)
    )
    asked: list[LocalStorage] = []
    monkeypatch.setattr(log_shipping, "drop_oldest_nodes", asked.append)
    of_node._send_node()
    assert asked == []
    of_coordinator._send_node()
    of_coordinator._sent = -1
    of_coordinator._send_node()
    assert asked == [storage], "once an hour"


def test_an_object_that_is_removed_while_lines_are_read_costs_no_others(tmp_path: Path) -> None:
    """The coordinator collects at any time: `logs` said that storage does not tell."""
    storage = LocalStorage(str(tmp_path), RUN)
    keys = [node_key(f"{number}" * 16) for number in range(3)]
    for key in keys:
        storage.put(key, zstandard.ZstdCompressor().compress(b'{"seq": 1}\n'))

    class Collected(LocalStorage):
        def list(self, prefix: str) -> Iterator[StoredObject]:
            listed = list(super().list(prefix))
            self.delete(keys[1])
            return iter(listed)

    assert set(stored_lines(Collected(str(tmp_path), RUN))) == {keys[0], keys[2]}


def test_of_many_nodes_the_lines_written_last_are_read(
    tmp_path: Path, storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of 4,096 nodes would take more than a machine has; what is not read is said."""
    for number in range(5):
        storage.put(node_key(f"{number}" * 16), zstandard.ZstdCompressor().compress(b"x" * 99 + b"\n"))
        os.utime(tmp_path / "runs" / RUN / node_key(f"{number}" * 16), (number, number))
    monkeypatch.setattr(log_shipping, "MOST_READ_BYTES", 200)
    assert list(stored_lines(storage)) == [node_key("4" * 16), node_key("3" * 16)]
    assert "3 objects of lines that were written longest ago are not read" in caplog.text
    assert list(stored_lines(storage, "1")) == [node_key("1" * 16)]


def test_what_storage_holds_of_lines_is_read_within_bounds(tmp_path: Path) -> None:
    """An object of 19 KB took 1.2 GiB: the frame itself says how much there is to come."""
    storage = LocalStorage(str(tmp_path), RUN)
    line = b'{"seq": 1}\n'
    storage.put("logs/nodes/a.jsonl.zst", zstandard.ZstdCompressor().compress(line))
    storage.put("logs/nodes/b.jsonl.zst", zstandard.ZstdCompressor().compress(bytes(64 << 20)))
    storage.put("logs/nodes/c.jsonl.zst", os.urandom((1 << 20) + 1))
    found = stored_lines(storage)
    assert found.pop("logs/nodes/a.jsonl.zst") == [line]
    assert [sum(map(len, lines)) for lines in found.values()] == [2 << 20], "the third is no object of ours"
