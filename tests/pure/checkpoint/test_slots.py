"""Snapshot slots: what is sealed reads back exactly, anything else does not read at all."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from picotron_ray.checkpoint.snapshot import slot_file, slot_pool
from picotron_ray.checkpoint.snapshot.replica_split import split_for_replica
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, encode_table, slot_bytes
from picotron_ray.checkpoint.snapshot.slot_pool import SlotPool, choose_folder, list_slots
from picotron_ray.checkpoint.snapshot.slot_reader import is_pinned, open_slot, read_header, set_pinned, verify
from picotron_ray.errors import CorruptError, SlotError
from picotron_ray.layout.shards import Box, Shard, subtract, uncovered, whole

SHARDS = (
    Shard("embed.weight", "float32", (8, 6), Box((4, 0), (4, 6))),
    Shard("norm.weight", "bfloat16", (6,), Box((0,), (6,))),
    Shard("exp_avg/embed.weight", "float64", (8, 6), Box((4, 0), (4, 6))),
)
HEADER = SlotHeader(
    term=2,
    n=3,
    step=17,
    rank=1,
    fragments=((0, 1, 2),),
    layout={"dp": 2, "tp": 1},
    cursor=544,
    ledger=('{"step": 16}', '{"step": 17}'),
    extra={"note": "x"},
)


def contents(seed: int = 0, shards: Sequence[Shard] = SHARDS) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(shard.nbytes) for shard in shards]


@pytest.fixture
def slot(tmp_path: Path) -> SlotFile:
    return SlotFile.create(tmp_path / "w.0.slot", slot_bytes(SHARDS))


def test_a_slot_has_room_for_all_its_parts() -> None:
    assert slot_bytes(SHARDS) == 66 * 4096, "4096 + 148 of the table + 384 + 3 digests + 256 KiB, in pages"
    many = [replace(SHARDS[1], name=f"n{index}") for index in range(1000)]
    bare = Shard("", "uint8", (64,), whole((64,)))
    full = replace(bare, name="n" * (4016 - len(encode_table([bare]))))
    assert slot_bytes([full]) == 66 * 4096 == 4096 + 4016 + 64 + 16 + 256 * 1024, "not a byte is left"
    needed = 4096 + len(encode_table(many)) + 1000 * (64 + 16) + 256 * 1024
    assert needed <= slot_bytes(many) < needed + 4096


def test_the_places_in_a_file(slot: SlotFile) -> None:
    """As a slot is described: other processes, and later versions, look there."""
    slot.write(HEADER, SHARDS, contents(), pinned=True)
    raw = slot.path.read_bytes()
    table, header = encode_table(SHARDS), raw[raw.index(b'{"term":2') : raw.index(b'{"step": 16}')]
    ledger = "\n".join(HEADER.ledger).encode()
    body = -(-(4096 + len(table)) // 64) * 64
    places = [(4096, len(table)), (body, 384), (body + 384, 48), (body + 432, len(header))]
    places.append((body + 432 + len(header), len(ledger)))
    assert struct.unpack("<10Q", raw[16:96]) == tuple(number for place in places for number in place)
    assert (raw[:8], raw[8]) == (b"PRSLOT01", 1)
    parts = [raw[at : at + length] for at, length in places]
    assert [parts[0], parts[3], parts[4]] == [table, header, ledger]
    assert [
        parts[1][at : at + len(data)] for at, data in zip((0, 128, 192), contents(), strict=True)
    ] == contents()
    assert parts[2] == b"".join(xxhash.xxh3_128_digest(data) for data in contents())
    sealed = b"".join([raw[16:96], parts[0], *parts[2:]])
    assert raw[96:112] == xxhash.xxh3_128_digest(sealed)
    set_pinned(slot.path, True, reading=True)
    assert slot.path.read_bytes()[8] == 2
    slot.unseal()
    assert slot.path.read_bytes()[96:113] == bytes(16) + raw[112:113]
    assert slot.path.stat().st_mode & 0o777 == 0o600, "nobody else's"


@pytest.mark.parametrize(("asked", "made"), [(1, 8192), (8192, 8192), (8193, 12288)])
def test_a_slot_has_whole_pages(asked: int, made: int, tmp_path: Path) -> None:
    slot = SlotFile.create(tmp_path / "x.slot", asked)
    assert slot.capacity == slot.path.stat().st_size == made
    slot.close()
    assert slot.path.exists()


def test_a_slot_grows_by_a_slack_where_it_is_full(slot: SlotFile) -> None:
    before = slot.capacity
    slot.write(HEADER, SHARDS, contents())
    room = before - sum(struct.unpack("<2Q", slot.path.read_bytes()[80:96]))
    whole_file = len("\n".join(HEADER.ledger)) + room
    slot.write(replace(HEADER, ledger=("x" * whole_file,)), SHARDS, contents())
    assert slot.capacity == before
    assert verify(slot.path).header.ledger == ("x" * whole_file,)
    slot.write(replace(HEADER, ledger=("x" * (whole_file + 1),)), SHARDS, contents())
    assert slot.capacity == before + 256 * 1024 + 4096
    assert verify(slot.path).header.ledger == ("x" * (whole_file + 1),)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_phase_is_told_at_half_of_the_body(count: int, slot: SlotFile) -> None:
    shards = [Shard(str(number), "uint8", (64,), whole((64,))) for number in range(count)]
    written = [bytes([number + 1]) * 64 for number in range(count)]
    seen: list[list[bool]] = []

    def look(phase: str) -> None:
        raw = slot.path.read_bytes()
        seen.append([data in raw for data in written])

    slot.write(HEADER, shards, written, on_phase=look)
    half = (count + 1) // 2
    assert seen == [[number < half for number in range(count)]]


def test_a_slot_that_does_not_fit_leaves_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(SlotError):
            SlotFile.create(tmp_path / "x.slot", 1 << 60)
    assert len(os.listdir("/proc/self/fd")) == before
    slot = SlotFile.create(tmp_path / "y.slot", 1)
    slot.close(unlink=True)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


def test_a_slot_that_was_removed_meanwhile_does_not_fit_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, descriptor: int, start: int, length: int) -> None:
        path.unlink()
        raise SlotError("no room")

    monkeypatch.setattr(slot_file, "_allocate", full)
    with pytest.raises(SlotError, match="no room"):
        SlotFile.create(tmp_path / "x.slot", 1)


def test_slots_that_do_not_all_fit_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = slot_file._allocate

    def second_fails(path: Path, descriptor: int, start: int, length: int) -> None:
        if path.name == "w.1.slot":
            raise SlotError("no room")
        allocate(path, descriptor, start, length)

    pool = SlotPool(tmp_path, "v", 2, 1)
    pool.close()
    assert pool.slots == []
    monkeypatch.setattr(slot_file, "_allocate", second_fails)
    with pytest.raises(SlotError):
        SlotPool(tmp_path, "w", 3, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.0.slot", "v.1.slot"]


@pytest.mark.parametrize(("name", "said"), [("", "<bytes>"), ("mine", "mine")])
def test_bytes_that_are_no_slot_are_named(name: str, said: str) -> None:
    with pytest.raises(CorruptError, match=f"^slot {said} is not sealed; use an older snapshot$") as caught:
        open_slot(bytes(5000), name)
    assert caught.value.where == said


def test_room_is_what_users_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=3, f_frsize=5, f_bfree=9))
    assert slot_file.free_bytes(tmp_path) == 15


def test_a_slot_that_is_gone_can_be_closed(slot: SlotFile) -> None:
    slot.path.unlink()
    open_files = len(os.listdir("/proc/self/fd"))
    slot.close(unlink=True)
    assert slot._map.closed
    assert len(os.listdir("/proc/self/fd")) == open_files - 2, "its own, and the one of its map"
    assert not slot.path.exists()


def test_a_slot_of_nothing(slot: SlotFile) -> None:
    assert slot.path.read_bytes().strip(b"\0") == b"PRSLOT01"
    slot.write(HEADER, (), [])
    assert struct.unpack("<6Q", slot.path.read_bytes()[16:64]) == (4096, 2, 4160, 0, 4160, 0)
    assert verify(slot.path).shards == ()
    assert not slot.pinned
    assert not is_pinned(slot.path)


def test_slots_lie_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_pool, "free_bytes", {"memory": 99e9, "disk": 100e9}.__getitem__)
    seen = "snapshot.folder: saw 99 GB free in memory, expected 100 GB for the slots"
    assert choose_folder("memory", None, 99 * 10**9) == ("memory", "")
    assert choose_folder("memory", "disk", 100 * 10**9) == ("disk", f"{seen}; using disk instead (slower)")
    with pytest.raises(SlotError) as caught:
        choose_folder("memory", None, 100 * 10**9)
    assert str(caught.value) == f"{seen}; enlarge it, lower snapshot.slots, or set snapshot.overflow_folder"
    with pytest.raises(SlotError) as caught:
        choose_folder("memory", "disk", 101 * 10**9)
    assert str(caught.value) == (
        "snapshot.overflow_folder: saw 100 GB free in disk, expected 101 GB as in memory; enlarge one, or"
        " lower snapshot.slots"
    )


def test_round_trip(slot: SlotFile) -> None:
    data = contents()
    slot.write(HEADER, SHARDS, data, pinned=True)
    view = verify(slot.path)
    assert view.header == HEADER
    assert [entry.shard for entry in view.shards] == list(SHARDS)
    assert [bytes(view.raw(entry)) for entry in view.shards] == data
    assert is_pinned(slot.path)
    set_pinned(slot.path, False)
    assert not slot.pinned
    assert read_header(slot.path) == HEADER, "the pin is not part of the seal"


def test_copied_bytes_read_like_the_file(slot: SlotFile) -> None:
    slot.write(HEADER, SHARDS, contents())
    view = open_slot(slot.path.read_bytes(), "copy")
    assert [bytes(view.checked(entry)) for entry in view.shards] == contents()


def test_unsealed_while_half_written(slot: SlotFile) -> None:
    slot.write(HEADER, SHARDS, contents())
    seen: list[object] = []

    def look(phase: str) -> None:
        half = slot.path.read_bytes()
        seen.extend([phase, read_header(slot.path), any(part in half for part in contents(1))])

    slot.write(HEADER, SHARDS, contents(1), on_phase=look)
    assert seen == ["snapshot", None, True], "half of the new bytes were there, and no header was offered"
    assert read_header(slot.path) == HEADER


def test_overwrite_is_noticed_by_a_reader(slot: SlotFile) -> None:
    slot.write(HEADER, SHARDS, contents())
    view = open_slot(slot.path)
    assert view.still_sealed()
    slot.write(SlotHeader(2, 3, 18, 1), SHARDS, contents(1))
    assert not view.still_sealed()


def test_every_flipped_bit_is_noticed(slot: SlotFile) -> None:
    """Flip single bits of a sealed slot all over the file: the content is refused or unchanged."""
    slot.write(HEADER, SHARDS, contents())
    good = slot.path.read_bytes()
    used = max(entry.offset + entry.shard.nbytes for entry in open_slot(good).shards) + 48 + 256
    source, refused = random.Random(1), 0
    for _ in range(600):
        at = source.choice([source.randrange(4096, used), source.randrange(0, 112)])
        bad = bytearray(good)
        bad[at] ^= 1 << source.randrange(8)
        try:
            view = open_slot(bad)
            data = [bytes(view.checked(entry)) for entry in view.shards]
        except CorruptError:
            refused += 1
        else:
            assert (view.header, data) == (HEADER, contents()), f"byte {at}"
    assert refused > 400


@pytest.mark.parametrize("length", [0, 50, 100, 4095, 4096, 4200, 4500])
def test_truncated_slot_is_not_offered(slot: SlotFile, length: int) -> None:
    slot.write(HEADER, SHARDS, contents())
    os.truncate(slot.path, length)
    assert read_header(slot.path) is None
    with pytest.raises(CorruptError, match=r"w\.0\.slot"):
        verify(slot.path)


def test_corrupt_body_names_slot_and_tensor(slot: SlotFile) -> None:
    slot.write(HEADER, SHARDS, contents())
    entry = open_slot(slot.path).shards[2]
    with slot.path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\xff\xff\xff", entry.offset + 3)
    assert read_header(slot.path) == HEADER, "only the body is damaged"
    with pytest.raises(CorruptError, match=r"exp_avg/embed\.weight") as caught:
        verify(slot.path, "node-a/w.0.slot")
    assert caught.value.where == "node-a/w.0.slot"


def test_slot_grows_for_other_shards_and_a_long_ledger(slot: SlotFile) -> None:
    bigger = (Shard("embed.weight", "float64", (300, 200), whole((300, 200))),)
    lines = tuple(f'{{"step": {step}}}' for step in range(30_000))
    slot.write(SlotHeader(1, 1, 1, 0, ledger=lines), bigger, contents(0, bigger))
    assert verify(slot.path).header.ledger == lines
    slot.write(HEADER, SHARDS, contents())
    assert verify(slot.path).header == HEADER


def test_wrong_buffer_length_leaves_the_slot_unsealed(slot: SlotFile) -> None:
    slot.write(HEADER, SHARDS, contents())
    with pytest.raises(SlotError, match=r"norm\.weight: saw 3 bytes, expected 12"):
        slot.write(HEADER, SHARDS, [contents()[0], b"abc", contents()[2]])
    assert read_header(slot.path) is None


def test_too_small_a_file_system_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(SlotError, match=r"needs \d+ bytes .* free .*overflow_folder") as caught:
        SlotPool("/dev/shm", f"test-{os.getpid()}", 2, 1 << 50)
    assert "\n" not in str(caught.value)
    assert not list(Path("/dev/shm").glob(f"test-{os.getpid()}*"))
    with pytest.raises(SlotError, match=r"expected .* for the slots"):
        choose_folder(str(tmp_path), None, 1 << 50)
    assert choose_folder(str(tmp_path), None, 1) == (str(tmp_path), "")
    missing = str(tmp_path / "missing")
    with pytest.raises(SlotError, match=r"^snapshot\.folder: .*missing: No such file"):
        choose_folder(missing, None, 1)
    with pytest.raises(SlotError, match=r"^snapshot\.overflow_folder: .*missing: No such file"):
        choose_folder(str(tmp_path), missing, 1 << 50)


def test_pool_never_gives_a_slot_that_may_be_needed(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "w", 3, slot_bytes(SHARDS))

    def write(step: int, newest: tuple[int, int, int], n: int = 1, pinned: bool = False) -> str | None:
        slot = pool.choose(newest)
        if slot is None:
            return None
        slot.write(SlotHeader(1, n, step, 0), SHARDS, contents(step), pinned=pinned)
        return slot.path.name

    assert [write(k, (1, 1, 0)) for k in (1, 2, 3)] == ["w.0.slot", "w.1.slot", "w.2.slot"]
    assert write(4, (1, 1, 1)) is None, "1 is the newest complete step, 2 and 3 may become it"
    assert write(4, (1, 1, 2)) == "w.0.slot"
    assert write(5, (1, 1, 4), pinned=True) == "w.1.slot"
    assert write(6, (1, 1, 5)) == "w.2.slot"
    assert write(7, (1, 1, 6)) == "w.0.slot", "5 is older but pinned"
    assert write(8, (1, 1, 7)) == "w.2.slot", "and stays so"
    set_pinned(tmp_path / "w.1.slot", False)
    assert write(7, (1, 2, 6), n=2) == "w.1.slot", "older generations are older than any newer step"
    assert [header.step for _, header in list_slots(tmp_path)] == [7, 7, 8]
    pool.close(unlink=True)
    assert list_slots(tmp_path) == []


def test_what_a_rewind_went_back_behind_gives_way(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "w", 3, slot_bytes(SHARDS))
    for step in (4, 5, 6):
        slot = pool.choose((1, 1, 0))
        assert slot is not None
        slot.write(SlotHeader(1, 1, step, 0), SHARDS, contents(step))
    assert pool.choose((1, 1, 4)) is None, "of the present generation: 5 and 6 may become complete"
    void = pool.choose((1, 1, 4), (1, 2))
    assert void is not None
    assert void.key == (1, 1, 5), "and never the state that it came from"
    void.write(SlotHeader(1, 2, 9, 0), SHARDS, contents(9))
    other = pool.choose((1, 1, 4), (1, 2))
    assert other is not None
    assert other.key == (1, 1, 6)
    other.write(SlotHeader(1, 2, 10, 0), SHARDS, contents(10))
    assert pool.choose((1, 1, 4), (1, 2)) is None
    pool.close(unlink=True)


def test_a_newer_checkpoint_takes_the_slot_of_an_older_one_that_nobody_uploads(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "w", 3, slot_bytes(SHARDS))

    def write(step: int, newest: int, pinned: bool = False) -> str | None:
        slot = pool.choose((1, 1, newest))
        if slot is None:
            return None
        slot.write(SlotHeader(1, 1, step, 0), SHARDS, contents(step), pinned=pinned)
        return slot.path.name

    assert [write(k, k - 1, pinned=True) for k in (1, 2)] == ["w.0.slot", "w.1.slot"]
    assert write(3, 2) == "w.2.slot"
    set_pinned(tmp_path / "w.0.slot", True, reading=True)
    assert write(4, 3) is None, "1 is being uploaded, 2 is the only one that waits, 3 is the newest"
    set_pinned(tmp_path / "w.0.slot", True)
    assert write(4, 3) == "w.0.slot", "1 gives way to 2"
    assert write(5, 4) == "w.2.slot"
    assert read_header(tmp_path / "w.1.slot").step == 2
    pool.close(unlink=True)


# --- shares and boxes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    shard: Shard
    tensor: np.ndarray
    primary: bool = True


def held(count: int) -> list[Held]:
    source = random.Random(count)
    tensors = []
    for number in range(count):
        shape = tuple(source.randint(1, 9) for _ in range(source.randint(0, 3)))
        shard = Shard(f"t{number}", "float32", shape, whole(shape))
        tensors.append(Held(shard, np.arange(shard.box.numel).reshape(shape), primary=number % 5 != 4))
    return tensors


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shares_are_disjoint_complete_and_balanced(count: int) -> None:
    tensors = held(40)
    shares = [split_for_replica(tensors, index, count) for index in range(count)]
    for tensor in tensors:
        parts = [part for member in shares for part in member if part.shard.name == tensor.shard.name]
        assert sum(part.shard.box.numel for part in parts) == tensor.shard.box.numel * tensor.primary
        assert not uncovered(tensor.shard.box, [part.shard.box for part in parts]) or not tensor.primary
        joined = [value for part in parts for value in part.tensor.reshape(-1).tolist()]
        assert joined == (tensor.tensor.reshape(-1).tolist() if tensor.primary else [])
        assert all(part.tensor.shape == part.shard.box.size for part in parts)
    sizes = [sum(part.shard.nbytes for part in member) for member in shares]
    assert max(sizes) - min(sizes) <= 2 * 81 * 4, "at most a row of the largest tensor at either end"


def shares(count: int, *shards: Shard) -> list[list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    tensors = [Held(shard, np.zeros(shard.box.size)) for shard in shards]
    return [
        [(part.shard.name, part.shard.box.offset, part.shard.box.size) for part in member]
        for member in (split_for_replica(tensors, index, count) for index in range(count))
    ]


def test_shares_by_hand() -> None:
    ten = Shard("a", "uint8", (10,), whole((10,)))
    assert shares(2, ten) == [[("a", (0,), (5,))], [("a", (5,), (5,))]]
    assert shares(3, ten) == [[("a", (0,), (3,))], [("a", (3,), (3,))], [("a", (6,), (4,))]]
    cut = Shard("b", "float32", (9, 9), Box((3, 2), (4, 5)))
    assert shares(2, cut) == [[("b", (3, 2), (2, 5))], [("b", (5, 2), (2, 5))]]
    assert shares(2, ten, cut) == [  # 90 bytes: 45 are a and 35 of b, which end in its second row
        [("a", (0,), (10,)), ("b", (3, 2), (2, 5))],
        [("b", (5, 2), (2, 5))],
    ]
    scalars = [Shard(name, "float32", (), Box((), ())) for name in "cd"]
    assert shares(4, *scalars) == [[("c", (), ())], [], [("d", (), ())], []]


def test_box_subtraction_against_counting() -> None:
    source = random.Random(5)
    for _ in range(200):
        shape = tuple(source.randint(1, 6) for _ in range(source.randint(0, 3)))
        covers = []
        for _ in range(source.randint(0, 4)):
            offset = tuple(source.randrange(n) for n in shape)
            size = tuple(source.randint(1, n - at) for n, at in zip(shape, offset, strict=True))
            covers.append(Box(offset, size))
        mask = np.zeros(shape, dtype=int)
        for box in covers:
            mask[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))] = 1
        rest = uncovered(whole(shape), covers)
        assert sum(box.numel for box in rest) == int((mask == 0).sum())
        for box in rest:
            assert not mask[tuple(slice(a, a + n) for a, n in zip(box.offset, box.size, strict=True))].any()
    assert subtract(whole((3,)), Box((5,), (1,))) == [whole((3,))]


def test_a_state_that_is_known_to_be_sound_is_overwritten_last(tmp_path: Path) -> None:
    pool = SlotPool(tmp_path, "w", 3, 1 << 16)
    for slot, step in zip(pool.slots, (4, 5, 6), strict=True):
        slot.write(replace(HEADER, step=step), (), [])
    key = (HEADER.term, HEADER.n, 6)
    oldest, next_one = pool.slots[0], pool.slots[1]
    assert pool.choose(key) is oldest
    assert pool.choose(key, kept=(HEADER.term, HEADER.n, 4)) is next_one
    next_one.set_pinned(True)
    assert pool.choose(key, kept=(HEADER.term, HEADER.n, 4)) is oldest, "rather than none at all"
    pool.close()


def test_what_is_still_is_written_once_a_generation(slot: SlotFile) -> None:
    """The slot keeps its bytes and their digest; another generation, or other shards, ask for all again."""
    first, second = contents(0), contents(1)
    assert not slot.holds(HEADER, SHARDS)
    slot.write(HEADER, SHARDS, first)
    later = replace(HEADER, step=18)
    assert slot.holds(later, SHARDS)
    slot.write(later, SHARDS, [None, *second[1:]])
    assert verify(slot.path).header.step == 18
    assert not slot.holds(replace(later, n=4), SHARDS)
    assert not slot.holds(later, SHARDS[:2])
    raw = slot.path.read_bytes()
    assert first[0] in raw
    assert second[1] in raw
    assert first[2] not in raw

    def torn() -> Iterator[bytes | None]:
        yield None
        raise OSError("torn")

    with pytest.raises(OSError, match="torn"):
        slot.write(later, SHARDS, torn())
    assert not slot.holds(later, SHARDS), "nobody knows what lies there"
    slot.write(later, SHARDS, second)
    assert second[0] in slot.path.read_bytes()
