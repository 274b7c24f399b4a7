"""Blocks of the log: a restart after a week reads few objects, and only what the log itself says."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store import log_blocks
from picotron_ray.checkpoint.store.run_log import Entry, RunLog, encode_entry, entry_key
from picotron_ray.errors import FencedError, StorageFullError
from tests.support.checkpoint.checkpoint_kit import generation

NONCE = "{:032x}"


class Counted(LocalStorage):
    """Storage that counts what is read."""

    def __init__(self, root: str, run: str) -> None:
        super().__init__(root, run)
        self.reads: list[str] = []
        self.full = False

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads.append(key)
        return super().get_range(key, start, length)

    def put(self, key: str, data: bytes) -> None:
        if self.full:
            raise StorageFullError("full")
        super().put(key, data)


@pytest.fixture
def storage(memory_path: Path) -> Counted:
    return Counted(str(memory_path), "r1")


def a_long_log(storage: LocalStorage, entries: int, salt: int = 0, first: int = 1) -> None:
    """Put entries of a run whose commits are retired in turn, as a coordinator of term 1 writes them."""
    for seq in range(first, entries + 1):
        kind, body = "commit", {"term": 1, "n": 1, "step": seq, "manifest": f"m/{seq}", "digest": "d" * 64}
        if seq <= 2:
            kind, body = ("term", {"owner": "a"}) if seq == 1 else ("generation", dict(generation(1, 1)))
        elif seq % 2:
            kind, body = "retire", {"manifests": [f"m/{seq - 5}"]}
        entry = Entry(seq, kind, 1, "w", NONCE.format(salt + seq), body)  # type: ignore[arg-type]
        path = Path(storage.where) / entry_key(seq)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_entry(entry))


def read(storage: LocalStorage, blocks: bool = True) -> RunLog:
    log = RunLog(storage, blocks=blocks)
    log.refresh()
    return log


def blocked(storage: LocalStorage, entries: int) -> RunLog:
    """A long log of which all blocks are written."""
    a_long_log(storage, entries)
    writer = read(storage)
    while writer.keep_blocks():
        pass
    return writer


def same(storage: LocalStorage) -> RunLog:
    """Read the log with and without blocks, and compare."""
    log, plain = read(storage), read(storage, blocks=False)
    assert log.entries() == plain.entries()
    assert log.complaints() == plain.complaints()
    assert log.commits() == plain.commits()
    return log


def paths(storage: LocalStorage) -> list[Path]:
    return sorted((Path(storage.where) / "log_blocks").rglob("*.jsonl"))


def test_a_restart_reads_two_objects_a_block_and_the_entries_since(storage: Counted) -> None:
    assert log_blocks.BLOCK == 256
    blocked(storage, 4 * 256 + 30)
    storage.reads.clear()
    log = read(storage)
    assert len(storage.reads) == 1 + 2 * 4 + 30, "it was 1054, and 24,191 after a week"
    assert log.claim_term("b") == 2
    assert same(storage).entries()[-1].term == 2


def test_blocks_are_written_some_at_a_time_and_each_once(storage: Counted) -> None:
    a_long_log(storage, 3 * 256 + 255)
    writer = read(storage)
    assert [writer.keep_blocks() for _ in range(3)] == [2, 1, 0]
    a_long_log(storage, 4 * 256, first=4 * 256)
    writer.refresh()
    assert [writer.keep_blocks() for _ in range(2)] == [1, 0]
    assert read(storage).keep_blocks() == 0, "a reader that took them from blocks knows that they are there"
    assert [path.name for path in paths(storage)] == [f"{block:08d}.jsonl" for block in range(4)]


def test_a_short_log_is_asked_for_no_block(storage: Counted) -> None:
    a_long_log(storage, 255)
    assert read(storage).keep_blocks() == 0
    assert not paths(storage)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_blocks, "BLOCK", 8)


def text(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change a file, and leave its time."""
    stat = path.stat()
    path.write_bytes(change(path.read_bytes()))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("how", ["flip", "cut", "longer", "empty", "swapped", "missing"])
def test_a_damaged_block_is_as_if_it_were_not_there(storage: Counted, how: str) -> None:
    blocked(storage, 30)
    block = paths(storage)[1]
    changes: dict[str, Callable[[bytes], bytes]] = {
        "flip": lambda data: data.replace(b"m/12", b"m/92"),
        "cut": lambda data: data[:-1],
        "longer": lambda data: data + b"\nx",
        "empty": lambda data: b"",
        "swapped": lambda data: paths(storage)[2].read_bytes(),
    }
    if how == "missing":
        block.unlink()
    else:
        before = block.read_bytes()
        text(block, changes[how])
        assert block.read_bytes() != before
    log = same(storage)
    assert len(log.entries()) == 30
    assert log.keep_blocks() == 1, "it is written again"
    assert read(storage).keep_blocks() == 0


@pytest.mark.usefixtures("small")
def test_an_oversized_block_is_not_read_through(storage: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked(storage, 16)
    monkeypatch.setattr(log_blocks, "JSON_BYTES", 1000)
    assert len(same(storage).entries()) == 16
    monkeypatch.setattr(log_blocks, "_WRITE_BYTES", 1000)
    other = Counted(str(Path(storage.where).parent), "r2")
    assert blocked(other, 16).entries()
    assert not paths(other), "large entries stay alone"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("how", ["gone", "cut", "damaged"])
@pytest.mark.parametrize("seq", [1, 9, 12, 16])
def test_an_entry_that_is_damaged_or_gone_stays_so(storage: Counted, seq: int, how: str) -> None:
    blocked(storage, 30)
    path = Path(storage.where) / entry_key(seq)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9] if how == "cut" else b"x" * path.stat().st_size)
        os.utime(path, (path.stat().st_mtime + 1,) * 2)  # later than the block by any clock
    log = same(storage)
    assert len(log.entries()) == 29
    assert len(log.complaints()) == 1
    assert log.keep_blocks() == 0, "no block holds what cannot be read"


@pytest.mark.usefixtures("small")
def test_damage_that_neither_size_nor_time_betrays_is_found_where_each_entry_is_read(
    storage: Counted,
) -> None:
    blocked(storage, 30)
    text(Path(storage.where) / entry_key(12), lambda data: data.replace(b"m/12", b"m/92"))
    assert len(read(storage).entries()) == 30, "the block has what was written"
    assert "log/00000012.json" in read(storage, blocks=False).complaints()[0]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("touched", [False, True])
def test_a_log_that_was_cut_and_written_on_is_not_the_one_that_was_copied(
    storage: Counted, touched: bool
) -> None:
    blocked(storage, 24)
    for seq in range(12, 25):
        (Path(storage.where) / entry_key(seq)).unlink()
    assert len(same(storage).entries()) == 11, "of a block that is not whole nothing is taken"
    a_long_log(storage, 30, salt=1000, first=12)
    if touched:  # as if an old writer had copied what it knew, late
        for path in paths(storage):
            os.utime(path)
    assert [entry.nonce for entry in same(storage).entries()][11] == NONCE.format(1012)


@pytest.mark.usefixtures("small")
def test_blocks_of_an_earlier_run_of_the_name_are_not_this_runs(storage: Counted) -> None:
    blocked(storage, 24)
    a_long_log(storage, 24, salt=1000)
    for path in paths(storage):
        os.utime(path)
    storage.reads.clear()
    log = read(storage)
    assert log.identity == NONCE.format(1001)
    assert not [key for key in storage.reads if key.startswith("log_blocks/")]
    assert same(storage).keep_blocks() == 2


@pytest.mark.usefixtures("small")
def test_a_fence_that_lies_in_a_block_holds(storage: Counted) -> None:
    old = RunLog(storage)
    old.claim_term("a")
    for n in range(1, 8):
        old.append("generation", generation(1, n))  # the first block is full
    new = RunLog(storage)
    assert new.claim_term("b") == 2
    for step in range(40):
        new.append("commit", {"term": 1, "n": 1, "step": step, "manifest": f"m/{step}", "digest": ""})
    while new.keep_blocks():
        pass
    with pytest.raises(FencedError, match="holds term 2, this writer has term 1"):
        old.confirm()
    with pytest.raises(FencedError):
        old.append("retire", {"manifests": []})
    assert same(storage).claim_term("c") == 3


@pytest.mark.usefixtures("small")
def test_a_block_that_storage_does_not_take_is_written_later(storage: Counted) -> None:
    a_long_log(storage, 20)
    writer = read(storage)
    storage.full = True
    with pytest.raises(StorageFullError):
        writer.keep_blocks()
    storage.full = False
    assert writer.keep_blocks() == 2


def histories(draw: random.Random, storage: LocalStorage) -> Iterator[None]:
    """What may happen to a log and its blocks, one thing after the other."""
    base, entries = Path(storage.where), 0
    for turn in range(12):
        kind = draw.choice(("grow", "grow", "write", "write", "cut", "drop", "spoil", "mix"))
        found = paths(storage)
        if kind == "grow" or not entries:
            a_long_log(storage, entries + draw.randint(1, 14), salt=turn * 1000, first=entries + 1)
        elif kind == "write":
            read(storage).keep_blocks(draw.randint(1, 3))
        elif kind == "cut":
            for seq in range(draw.randint(2, entries + 1), entries + 1):
                (base / entry_key(seq)).unlink(missing_ok=True)
        elif kind == "drop":
            (base / entry_key(draw.randint(2, entries + 1))).unlink(missing_ok=True)
        elif kind == "spoil" and found:
            path = draw.choice(found)
            path.write_bytes(path.read_bytes()[: draw.randint(0, 2000)])
        elif kind == "mix" and len(found) > 1:
            one, other = draw.sample(found, 2)
            one.write_bytes(other.read_bytes())
        names = [path.name for path in (base / "log").iterdir()]
        entries = max(int(name[:8]) for name in names)
        yield


@pytest.mark.usefixtures("small")
def test_blocks_never_hide_or_invent_an_entry(memory_path: Path) -> None:
    believed = 0
    for seed in range(20):
        storage = Counted(str(memory_path), f"r{seed}")
        for _ in histories(random.Random(seed), storage):
            believed += len(same(storage)._blocks)
    assert believed > 40


@pytest.mark.usefixtures("small")
def test_a_block_has_generations_as_they_lie_in_the_log_though_a_reader_holds_less(
    storage: Counted,
) -> None:
    log = RunLog(storage)
    log.claim_term("a")
    for n in range(1, 16):
        log.append("generation", {**generation(1, n), "members": [[0, f"w{n}", "w"]], "nodes": ["a"]})
    assert [entry.slim for entry in log.entries()] == [False, *[True] * 14, False]
    assert log.keep_blocks() == 2
    for path in paths(storage):
        first = 1 + 8 * int(path.stem)
        entries = [Path(storage.where) / entry_key(seq) for seq in range(first, first + 8)]
        assert path.read_bytes().split(b"\n") == [entry.read_bytes() for entry in entries]
    assert [entry.body["members"] for entry in same(storage).entries()[-2:]] == [[], [[0, "w15", "w"]]]
    log = read(storage, blocks=False)
    for path in (*paths(storage), Path(storage.where) / entry_key(9)):
        path.unlink()
    assert log.keep_blocks() == 1, "an entry that is gone is in no block"
