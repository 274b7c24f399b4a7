"""Shard service: boxes of another node's slots arrive whole, or the reader hears why not, in time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from picotron_ray.checkpoint.shard_service import channel, client, server
from picotron_ray.checkpoint.shard_service.channel import MOST_BYTES, Channel, Endpoint
from picotron_ray.checkpoint.shard_service.client import RemoteSlot, ShardClient, frames
from picotron_ray.checkpoint.shard_service.server import Pacer, ShardServer
from picotron_ray.checkpoint.snapshot.ledger_spill import SUFFIX
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, slot_bytes
from picotron_ray.checkpoint.snapshot.slot_reader import open_slot
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.errors import CorruptError, ServiceBusyError, SlotUnreachableError
from picotron_ray.layout.shards import Box, Shard, as_elements, region, whole
from tests.support.checkpoint.open_files import a_thousand_open_files, no_open_files

SHARDS = (
    Shard("embed", "float32", (40, 6), Box((8, 0), (24, 6))),
    Shard("scalar", "float64", (), whole(())),
    Shard("norm", "bfloat16", (6,), whole((6,))),
)
KEY = (1, 2, 5)
GONE = r"closed|gone"


def write(folder: Path, key: tuple[int, int, int] = KEY, seed: int = 0) -> SlotFile:
    draw = np.random.default_rng(seed)
    slot = SlotFile.create(folder / "w.0.slot", slot_bytes(SHARDS))
    slot.write(SlotHeader(*key, 0, ledger=("line",)), SHARDS, [draw.bytes(s.nbytes) for s in SHARDS])
    return slot


@pytest.fixture
def slot(tmp_path: Path) -> SlotFile:
    return write(tmp_path)


@pytest.fixture
def service(tmp_path: Path, slot: SlotFile) -> Iterator[ShardServer]:
    with closing(ShardServer(tmp_path, "127.0.0.1", timeout_s=1.0)) as found:
        yield found


@pytest.fixture
def peer(service: ShardServer) -> Iterator[ShardClient]:
    with closing(ShardClient(lambda: service.endpoint, timeout_s=1.0)) as found:
        yield found


def test_a_reader_gets_the_boxes_that_it_asks_for_and_no_others(
    peer: ShardClient, slot: SlotFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(Pacer, "take", lambda self, count, *_: sent.append(count))
    local, far = SlotSource([("w.0.slot", slot.path)]), SlotSource([("w", RemoteSlot(peer, "w.0.slot", KEY))])
    assert far.views[0].header == local.views[0].header
    names = [shard.name for shard in SHARDS]
    for name, (piece,) in far.pieces(names).items():
        wanted = piece.shard.box
        if name == "embed":
            wanted = Box((10, 2), (7, 3))  # neither whole rows nor from the start
        ((box, elements),) = far.cutter(piece)(wanted)
        mine = as_elements(local.read(local.pieces([name])[name][0]), piece.shard)
        assert box == wanted
        assert np.array_equal(elements, mine[region(wanted, piece.shard.box)])
    assert sent == [7 * 3 * 4, 8, 12]
    far.finish()


def test_a_reader_beside_a_thousand_open_files_is_served(peer: ShardClient) -> None:
    with a_thousand_open_files():
        far = SlotSource([("w", RemoteSlot(peer, "w.0.slot", KEY))])
        assert far.views[0].header.step == KEY[2]
        far.finish()


def test_a_connection_that_breaks_after_it_worked_is_made_again(tmp_path: Path, slot: SlotFile) -> None:
    """The agent was started again, or the connection was idle for too long."""
    services = [ShardServer(tmp_path, "127.0.0.1", timeout_s=1.0) for _ in range(2)]
    asked: list[Endpoint] = []

    def find() -> Endpoint:
        asked.append(services[len(asked)].endpoint)
        return asked[-1]

    with closing(services[0]), closing(services[1]), closing(ShardClient(find, timeout_s=1.0)) as peer:
        far = RemoteSlot(peer, "w.0.slot", KEY)
        assert peer.channel is not None
        peer.channel.close()
        entry = far.shards[0]
        assert [box for box, _ in far.boxes(entry, entry.shard.box)] == [entry.shard.box]
        assert len(asked) == 2


def test_a_connection_that_breaks_is_made_again_once_for_all_slots_that_are_read_over_it(
    tmp_path: Path, service: ShardServer
) -> None:
    """Each slot opened for itself what it read next, and so undid what the other had just opened."""
    names = [f"w.{rank}.slot" for rank in range(3)]
    for rank, name in enumerate(names):
        made = SlotFile.create(tmp_path / name, slot_bytes(SHARDS))
        made.write(SlotHeader(*KEY, rank, ledger=()), SHARDS, [bytes(shard.nbytes) for shard in SHARDS])
    asked: list[Endpoint] = []

    def find() -> Endpoint:
        asked.append(service.endpoint)
        return service.endpoint

    with closing(ShardClient(find, timeout_s=1.0)) as peer:
        slots = [RemoteSlot(peer, name, KEY) for name in names]
        for breaks in (1, 2):
            assert peer.channel is not None
            peer.channel.close()
            for number, shard in enumerate(SHARDS):
                for far in slots:
                    assert [box for box, _ in far.boxes(far.shards[number], shard.box)] == [shard.box]
            assert len(asked) == 1 + breaks
        write(tmp_path, (1, 2, 6), seed=1)
        peer.channel.close()
        slots[1].check()
        with pytest.raises(SlotUnreachableError, match="overwritten"):
            slots[0].check()
        slots[2].check()
        assert len(asked) == 4, "what one slot's file became costs the others no connection"


@pytest.mark.parametrize("what", ["spilled", "check"])
def test_so_it_is_for_the_ledger_and_for_the_last_check(
    tmp_path: Path, slot: SlotFile, peer: ShardClient, what: str
) -> None:
    (tmp_path / f"1-9{SUFFIX}").write_bytes(b"{}\n")
    far = RemoteSlot(peer, "w.0.slot", KEY)
    assert peer.channel is not None
    peer.channel.close()
    if what == "spilled":
        assert far.spilled(f"1-9{SUFFIX}") == b"{}\n"
    else:
        far.check()
        write(tmp_path, (1, 2, 6), seed=1)
        peer.channel.close()
        with pytest.raises(SlotUnreachableError):
            far.check()


def test_what_is_wanted_is_cut_into_frames_in_order() -> None:
    shard = Shard("w", "uint8", (3, 50, 7), whole((3, 50, 7)))
    for most in (1, 6, 7, 100, 349, 350, 1049, 1050):
        boxes = list(frames(shard.box, shard, most))
        assert all(box.numel <= most for box in boxes)
        numbers = np.arange(1050).reshape(shard.global_shape)
        joined = np.concatenate([numbers[region(box, shard.box)].reshape(-1) for box in boxes])
        assert np.array_equal(joined, np.arange(1050)), f"row-major, at most {most} bytes"
    assert list(frames(Box((0, 0, 0), (3, 0, 7)), shard)) == []


def test_a_shard_of_many_frames_is_checked_as_a_whole(
    peer: ShardClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = list(frames(SHARDS[0].box, SHARDS[0], 48))
    monkeypatch.setattr(client, "frames", lambda box, shard: iter(cut))
    slot = RemoteSlot(peer, "w.0.slot", KEY)
    assert len(list(slot.boxes(slot.shards[0], SHARDS[0].box))) == 12
    slot.shards = (replace(slot.shards[0], digest=bytes(16)), *slot.shards[1:])
    slot._number = {id(slot.shards[0]): 0}
    with pytest.raises(CorruptError, match="embed does not match its digest") as caught:
        list(slot.boxes(slot.shards[0], SHARDS[0].box))
    assert caught.value.where == "w.0.slot"


def test_a_damaged_shard_is_not_handed_out_even_in_part(peer: ShardClient, slot: SlotFile) -> None:
    far = RemoteSlot(peer, "w.0.slot", KEY)
    at = open_slot(slot.path).shards[0].offset + SHARDS[0].nbytes - 1
    slot._map[at] ^= 1
    with pytest.raises(CorruptError, match="embed") as caught:
        list(far.boxes(far.shards[0], Box((8, 0), (1, 1))))
    assert caught.value.where == "w.0.slot"
    assert list(far.boxes(far.shards[2], SHARDS[2].box)), "the connection lives on"


def test_a_slot_of_another_state_or_overwritten_meanwhile_is_refused(
    peer: ShardClient, slot: SlotFile
) -> None:
    with pytest.raises(SlotUnreachableError, match=r"holds \(1, 2, 5\) now, expected \(1, 2, 6\)"):
        RemoteSlot(peer, "w.0.slot", (1, 2, 6))
    far = RemoteSlot(peer, "w.0.slot", KEY)
    far.check()
    slot.unseal()
    for act in (far.check, lambda: list(far.boxes(far.shards[0], SHARDS[0].box))):
        with pytest.raises(SlotUnreachableError, match="was overwritten") as caught:
            act()
        assert caught.value.where == "w.0.slot"
    with pytest.raises(SlotUnreachableError, match="not sealed"):
        RemoteSlot(peer, "w.0.slot", KEY)


def test_only_who_holds_the_token_is_served(service: ShardServer) -> None:
    assert service._listener.getsockname() == ("127.0.0.1", service.endpoint.port), "there and nowhere else"
    stranger = ShardClient(lambda: replace(service.endpoint, token="0" * 64), timeout_s=1.0)
    with pytest.raises(SlotUnreachableError, match=GONE):
        RemoteSlot(stranger, "w.0.slot", KEY)
    assert service.endpoint.token not in repr(service.endpoint)


def fake(answer: Callable[[socket.socket], None]) -> Endpoint:
    """An address where ``answer`` takes one connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as connection:
            answer(connection)

    threading.Thread(target=run, daemon=True).start()
    return Endpoint("127.0.0.1", listener.getsockname()[1], "token")


def drip(connection: socket.socket) -> None:
    with suppress(OSError):  # its reader has gone away
        for byte in channel.MAGIC + bytes(32):
            connection.sendall(bytes([byte]))
            time.sleep(0.02)


ENDS: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "silent": (lambda connection: time.sleep(2), "did not answer within 0.2 s"),
    "dripping": (drip, "did not answer within 0.2 s"),
    "gone": (lambda connection: None, "closed"),
    "another": (lambda connection: connection.sendall(bytes(40)), "is no shard service"),
    "lying": (
        lambda connection: [connection.sendall(channel.MAGIC + bytes(64)), time.sleep(2)],  # type: ignore[func-returns-value]
        "does not hold the token",
    ),
}


@pytest.mark.parametrize("kind", ENDS)
def test_a_peer_that_is_frozen_or_not_ours_is_given_up_in_time(kind: str) -> None:
    answer, words = ENDS[kind]
    began = time.monotonic()
    with pytest.raises(SlotUnreachableError, match=words) as caught:
        RemoteSlot(ShardClient(lambda: fake(answer), timeout_s=0.2), "w.0.slot", KEY)
    assert caught.value.where == "w.0.slot"
    assert time.monotonic() - began < 1.5


def test_no_one_listens(service: ShardServer) -> None:
    service.close()
    with pytest.raises(SlotUnreachableError, match="refused"):
        RemoteSlot(ShardClient(lambda: service.endpoint, 1.0), "w.0.slot", KEY)


def test_whoever_waits_for_a_frozen_peer_can_be_called_away() -> None:
    class CalledAwayError(Exception):
        pass

    calls: list[None] = []

    def meanwhile() -> None:
        calls.append(None)
        if len(calls) > 4:
            raise CalledAwayError

    with pytest.raises(CalledAwayError):
        RemoteSlot(ShardClient(lambda: fake(lambda c: time.sleep(0.5)), 60.0, meanwhile), "w.0.slot", KEY)


def pair() -> tuple[Channel, Channel]:
    """Both ends of one connection: the service's, and the reader's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found: list[Channel] = []
        serve = threading.Thread(
            target=lambda: found.append(Channel.accept(listener.accept()[0], "token", 1.0))
        )
        serve.start()
        mine = Channel.connect(Endpoint("127.0.0.1", listener.getsockname()[1], "token"), 1.0)
        serve.join()
    return found[0], mine


def test_a_frame_that_is_damaged_repeated_or_too_large_is_noticed() -> None:
    theirs, mine = pair()
    with closing(theirs), closing(mine):
        _check_frames(theirs, mine)


def _check_frames(theirs: Channel, mine: Channel) -> None:
    theirs.send(0, b"sound")
    assert mine.receive() == (0, b"sound")
    raw: list[bytes] = []
    theirs._send_all = lambda data: raw.append(bytes(data))  # type: ignore[method-assign]
    theirs.send(0, b"12345")
    sound = b"".join(raw)
    for spoilt in (sound[:-1] + b"4", b"\x01" + sound[1:]):
        theirs._socket.sendall(spoilt)
        with pytest.raises(SlotUnreachableError, match="does not match its digest"):
            mine.receive()
    theirs._socket.sendall(sound)
    assert mine.receive() == (0, b"12345")
    theirs._socket.sendall(sound)
    with pytest.raises(SlotUnreachableError, match="does not match its digest"):
        mine.receive()
    theirs._socket.sendall(sound)
    with pytest.raises(SlotUnreachableError, match="expected at most 4"):
        mine.receive(most=4)
    with pytest.raises(ValueError, match="at most"):
        theirs.send(0, bytes(MOST_BYTES + 1))


def test_a_request_that_makes_no_sense_ends_its_connection_alone(service: ShardServer) -> None:
    requests = (
        {}, {"what": "read", "slot": "w.0.slot"}, {"what": "check", "slot": "never-opened"}, [],
        {"what": "open", "slot": 5},
    )  # fmt: skip
    for request in requests:
        with closing(Channel.connect(service.endpoint, 1.0)) as asking:
            asking.send_json(channel.MESSAGE, request)
            with pytest.raises(SlotUnreachableError, match=GONE):
                asking.receive()
    for box in (Box((0,), (1,)), Box((40, 0), (1, 6)), Box((0, 0), (-1, 6))):
        with closing(ShardClient(lambda: service.endpoint, 1.0)) as peer:
            RemoteSlot(peer, "w.0.slot", KEY)
            asked = peer.ask(what="read", slot="w.0.slot", shard=0, offset=box.offset, size=box.size)
            with pytest.raises(SlotUnreachableError, match=GONE):
                asked.receive()


def test_readers_that_wait_for_the_pace_do_not_give_a_healthy_node_up(tmp_path: Path, slot: SlotFile) -> None:
    """All of them would at once: the last one's turn comes after more than its patience."""
    patience_s = 1.0
    service = ShardServer(tmp_path, "127.0.0.1", patience_s, SHARDS[0].nbytes / 0.7)
    problems: list[BaseException] = []

    def read() -> None:
        try:
            with closing(ShardClient(lambda: service.endpoint, patience_s)) as peer:
                found = RemoteSlot(peer, "w.0.slot", KEY)
                list(found.boxes(found.shards[0], found.shards[0].shard.box))
        except SlotUnreachableError as error:
            problems.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60.0)
    service.close()
    assert not problems


def test_all_connections_keep_one_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(server, "time", FakeTime(slept))
    pacer = Pacer(100.0)
    for count in (50, 100, 10):
        pacer.take(count, channel.nothing, float("inf"))
    Pacer(None).take(1 << 40, channel.nothing, 1.0)
    assert slept == [0.0, 0.5, 1.5, 0.0]


class FakeTime:
    """A clock that stands still."""

    def __init__(self, slept: list[float]) -> None:
        self.sleep = slept.append

    def monotonic(self) -> float:
        return 7.0


def test_a_moment_without_open_files_does_not_end_the_service(
    service: ShardServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Its port still took connections, which nobody answered until each reader's patience was over."""
    with closing(socket.socket()) as asking:
        with no_open_files():
            asking.connect((service.endpoint.host, service.endpoint.port))
            time.sleep(3 * server.PAUSE_S)
        told = [record.getMessage() for record in caplog.records if "cannot be taken" in record.getMessage()]
        assert len(told) == 1, "as it lasts, it is not told at each try"
        assert "Too many open files" in told[0]
    Channel.connect(service.endpoint, 1.0).close()


def test_a_moment_without_threads_does_not_end_the_service(
    service: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    service._slots = threading.BoundedSemaphore(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(SlotUnreachableError, match=GONE):
            Channel.connect(service.endpoint, 1.0)
    Channel.connect(service.endpoint, 1.0).close()


def test_a_closed_service_ends_its_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    service = ShardServer(tmp_path, "127.0.0.1", timeout_s=1.0)
    (thread,) = set(threading.enumerate()) - before
    service.close()
    thread.join(5.0)
    assert not thread.is_alive()


def test_no_more_than_so_many_connections_are_taken_and_the_others_hear_so(
    service: ShardServer,
) -> None:
    """They were closed without a word, as by a node that is lost."""
    service._slots = threading.BoundedSemaphore(1)
    found: list[None] = []

    def find() -> Endpoint:
        found.append(None)
        return service.endpoint

    with closing(Channel.connect(service.endpoint, 1.0)), closing(ShardClient(find, 1.0)) as peer:
        for _ in range(3):
            with pytest.raises(ServiceBusyError, match="busy") as caught:
                RemoteSlot(peer, "w.0.slot", KEY)
            assert caught.value.where == "w.0.slot"
        assert len(found) == 1, "its address is known"
