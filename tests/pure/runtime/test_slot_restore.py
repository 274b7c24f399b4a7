"""Restore from slots on several nodes: the own node's first, then another's, whatever becomes of those."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from picotron_ray.checkpoint.shard_service.channel import Channel, Endpoint
from picotron_ray.checkpoint.shard_service.server import ShardServer
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, SlotKey, slot_bytes
from picotron_ray.checkpoint.store.shard_sources import SlotSource
from picotron_ray.coordinator.messages import Fragment, GenerationId, GenerationSpec, Member, SlotInfo, Source
from picotron_ray.coordinator.policies.state_copies import ReadingOrder, with_copies
from picotron_ray.errors import CorruptError, PeerLostError, SlotUnreachableError
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard, copy_common
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.worker import slot_restore
from picotron_ray.runtime.worker.remote_slots import RemoteSlots
from picotron_ray.runtime.worker.slot_restore import SlotRestore
from tests.support.runs.coordinator_world import job

WROTE, STEP, KEY = GenerationId(1, 4), 7, (1, 4, 7)
ROWS, WIDTH = 24, 5
WHOLE = Shard("w", "float32", (ROWS, WIDTH), Box((0, 0), (ROWS, WIDTH)))
STATE_BYTES = ROWS * WIDTH * 4


class Node:
    """A node's folder, with a shard service of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self.folder, self.name, self.slots = folder, name, list[SlotInfo]()
        self.service = ShardServer(folder, "127.0.0.1", timeout_s=2.0)

    def write(self, low: int, high: int, part: Fragment | None, key: SlotKey = KEY) -> Path:
        """Seal rows of the state in a slot of their own."""
        name = f"{self.name}-{low}.0.slot"
        shard = Shard("w", "float32", (ROWS, WIDTH), Box((low, 0), (high - low, WIDTH)))
        slot = SlotFile.create(self.folder / name, slot_bytes([shard]))
        fragments = ((part.group, part.index, part.count),) if part else ()
        slot.write(SlotHeader(*key, 0, fragments), [shard], [values()[low:high].tobytes()])
        slot.close()
        self.slots.append(SlotInfo(self.name, name, WROTE, STEP, 0, (part,) if part else ()))
        return slot.path

    def write_halves(self, group: int = 0, low: int = 0, high: int = ROWS) -> None:
        middle = (low + high) // 2
        self.write(low, middle, Fragment(group, 0, 2))
        self.write(middle, high, Fragment(group, 1, 2))


def values() -> Any:
    return np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes = folder, dict[str, Node]()
        self.config = job(snapshot__fetch_timeout_s=2.0)
        self.page = Page(folder / "reader.page", self.config.elastic)
        self.phases: list[str] = []
        self.page.on_phase = lambda step, phase: self.phases.append(phase)
        self.leaves = False
        self.holders: Callable[[Sequence[Shard]], Collection[int]] = slot_restore.unknown

    def add(self, *names: str) -> list[Node]:
        self.nodes |= {name: Node(self.folder / name, name) for name in names}
        return [self.nodes[name] for name in names]

    def spec(
        self, *members: str, layout: Layout | None = None, wrote: Layout | None = None
    ) -> GenerationSpec:
        held = [slot for node in self.nodes.values() for slot in node.slots]
        first = dict[Any, str]()  # node, by the shares of its slot
        anchors = [s for s in held if first.setdefault(tuple(p.group for p in s.fragments), s.node) == s.node]
        source = Source("slots", STEP, WROTE, tuple(anchors), layout=wrote or Layout(dp=2))
        who = tuple(Member(f"w{rank}", node) for rank, node in enumerate(members))
        layout = layout or Layout(dp=len(members))
        return GenerationSpec(GenerationId(1, 5), who, layout, with_copies(source, held), "test")

    def restored(self, spec: GenerationSpec, rank: int, meanwhile: Any = None, wanted: Shard = WHOLE) -> Any:
        """What a member reads; ``meanwhile`` is called once it has read the first piece."""
        found = np.zeros(wanted.box.size, dtype=np.uint32)
        calls = [meanwhile] if meanwhile else []

        def read(source: SlotSource) -> None:
            for piece in source.pieces(["w"])["w"]:
                common = piece.shard.box.intersect(wanted.box)
                if common is None:
                    continue
                for box, elements in source.cutter(piece)(common):
                    copy_common(found, wanted.box, elements, box)
                if calls:
                    calls.pop()()
            source.finish()

        node = spec.members[rank].node
        with closing(RemoteSlots(self.page, self.config.snapshot, self.find, self.leave_if_asked)) as others:
            folder = self.folder / node
            restore = SlotRestore(spec, rank, folder, KEY, others, self.holders)
            restore.read([wanted], read)
        return found.view(np.float32)

    def find(self, node: str, meanwhile: Any) -> Endpoint:
        return self.nodes[node].service.endpoint

    def leave_if_asked(self) -> None:
        if self.leaves:
            raise PeerLostError("asked to leave")

    def served(self) -> dict[str, int]:
        return {name: node.service.served_bytes for name, node in self.nodes.items()}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    for node in found.nodes.values():
        node.service.close()


def test_members_read_the_copy_of_their_own_node(cluster: Cluster) -> None:
    for node in cluster.add("a", "b", "c"):
        node.write_halves()
    spec = cluster.spec("a", "a", "b", "b", "c", "c")
    assert {slot.node for slot in spec.source.slots} == {"a"}
    for rank in range(6):
        assert np.array_equal(cluster.restored(spec, rank), values())
    assert cluster.served() == {"a": 0, "b": 0, "c": 0}


def test_members_without_a_copy_are_spread_over_those_that_there_are(cluster: Cluster) -> None:
    for node in cluster.add("a", "b", "c"):
        node.write_halves()
    cluster.add("new")
    spec = cluster.spec("a", *["new"] * 6)
    for rank in range(1, 7):
        assert np.array_equal(cluster.restored(spec, rank), values())
    assert cluster.served() == dict.fromkeys("abc", 2 * STATE_BYTES) | {"new": 0}


def test_a_node_that_is_lost_in_the_middle_of_a_restore_is_made_good_by_the_next(cluster: Cluster) -> None:
    for node in cluster.add("a", "b"):
        node.write_halves()
    cluster.add("new")
    spec = cluster.spec("new")
    (first,) = {info.node for info in next(ReadingOrder(spec, 0).candidates(0))}
    other = "b" if first == "a" else "a"

    def lose() -> None:
        for path in (cluster.folder / first).glob("*.slot"):
            with path.open("r+b") as file:
                file.truncate(0)
                file.truncate(1 << 16)  # as a node that writes its next state over it

    assert np.array_equal(cluster.restored(spec, 0, lose), values())
    assert cluster.served() == {first: STATE_BYTES // 2, other: STATE_BYTES, "new": 0}


def test_a_copy_of_the_own_node_that_is_gone_is_read_from_another(cluster: Cluster) -> None:
    for node in cluster.add("a", "b"):
        node.write_halves()
    spec = cluster.spec("a", "b")
    (cluster.folder / "b" / "b-12.0.slot").unlink()
    assert np.array_equal(cluster.restored(spec, 1), values())
    assert cluster.served()["a"] == STATE_BYTES


def test_a_damaged_copy_is_a_failure_that_names_its_slot(cluster: Cluster) -> None:
    """It is to be set aside; the agent of its node has to hear of it."""
    for node in cluster.add("a", "b"):
        node.write_halves()
    path = cluster.folder / "b" / "b-12.0.slot"
    data = path.read_bytes()
    at = data.index(values()[12:].tobytes())
    path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with pytest.raises(CorruptError) as caught:
        cluster.restored(cluster.spec("a", "b"), 1)
    assert caught.value.where == path.name


def test_once_no_node_holds_it_all_that_were_tried_are_named(cluster: Cluster) -> None:
    for node in cluster.add("a", "b"):
        node.write_halves()
        node.service.close()
    cluster.add("new")
    with pytest.raises(SlotUnreachableError) as caught:
        cluster.restored(cluster.spec("new"), 0)
    assert {name[0] for name in caught.value.where.split(",")} == {"a", "b"}


def test_whoever_reaches_nobody_does_not_try_all(cluster: Cluster) -> None:
    for node in cluster.add(*"abcdefgh"):
        node.write_halves()
        node.service.close()
    cluster.add("new")
    with pytest.raises(SlotUnreachableError) as caught:
        cluster.restored(cluster.spec("new"), 0)
    assert len(caught.value.where.split(",")) == slot_restore.MOST_LOST + 1


def full(node: Node) -> list[Channel]:
    """Use up the connections of a service."""
    node.service._slots = threading.BoundedSemaphore(1)
    return [Channel.connect(node.service.endpoint, 1.0)]


def test_a_service_without_a_connection_left_is_passed_by(cluster: Cluster) -> None:
    first, second = cluster.add("a", "b")
    for node in (first, second):
        node.write_halves()
    cluster.add("new")
    with closing(full(first)[0]):
        assert np.array_equal(cluster.restored(cluster.spec("new"), 0), values())
    assert cluster.served() == {"a": 0, "b": STATE_BYTES, "new": 0}
    assert "queue" not in cluster.phases, "nobody waited"


def test_where_all_are_busy_a_member_waits_and_says_so(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = cluster.add("a")
    only.write_halves()
    cluster.add("new")
    held = full(only)
    waited: list[float] = []

    def pause(others: RemoteSlots, seconds: float) -> None:
        waited.append(seconds)
        others.wait()
        assert cluster.phases[-1] == "queue"
        if len(waited) == 5:
            held.pop().close()
            while not only.service._slots.acquire(timeout=5.0):  # until its end has seen it
                raise AssertionError("the service keeps a connection that is closed")
            only.service._slots.release()

    monkeypatch.setattr(RemoteSlots, "pause", pause)
    assert np.array_equal(cluster.restored(cluster.spec("new"), 0), values())
    assert len(waited) == 5
    first_s, longest_s = slot_restore.PAUSES_S
    assert waited[0] <= 1.5 * first_s < waited[-1] <= 1.5 * longest_s
    assert len(set(waited)) == 5, "readers do not come back all at once"


def test_a_wait_for_busy_nodes_can_be_left_and_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = cluster.add("a")
    only.write_halves()
    cluster.add("new")
    with closing(full(only)[0]):
        monkeypatch.setattr(slot_restore, "MOST_BUSY_S", 0.1)
        with pytest.raises(SlotUnreachableError, match=r"busy for 0\.1 s") as caught:
            cluster.restored(cluster.spec("new"), 0)
        assert caught.value.where.startswith("a-")
        monkeypatch.setattr(slot_restore, "MOST_BUSY_S", 1e9)
        asked: list[None] = []

        def leave() -> None:
            asked.append(None)
            if len(asked) > 50:
                raise PeerLostError("asked to leave")

        monkeypatch.setattr(cluster, "leave_if_asked", leave)
        with pytest.raises(PeerLostError):
            cluster.restored(cluster.spec("new"), 0)


def test_no_more_slots_are_opened_than_a_member_needs(cluster: Cluster) -> None:
    """Each share of a cut state is on one node; to open all takes connections by the square of the nodes."""
    nodes = cluster.add("a", "b", "c", "d")
    for group, node in enumerate(nodes):
        node.write_halves(group, 6 * group, 6 * group + 6)
    spec = cluster.spec(*"abcd", layout=Layout(dp=4, zero=1), wrote=Layout(dp=4, zero=1))
    for node in nodes[:1] + nodes[3:]:
        node.service.close()
    mine = Shard("w", "float32", (ROWS, WIDTH), Box((6, 0), (12, WIDTH)))
    assert np.array_equal(cluster.restored(spec, 1, wanted=mine), values()[6:18])
    assert cluster.served() == {"a": 0, "b": 0, "c": STATE_BYTES // 4, "d": 0}


def shares(cluster: Cluster) -> Cluster:
    """Four shares, each on a node of its own; nodes e and f hold copies of c's; the reader has none."""
    for group, node in enumerate(cluster.add("a", "b", "c", "d")):
        node.write_halves(group, 6 * group, 6 * group + 6)
    for node in cluster.add("e", "f"):
        node.write_halves(2, 12, 18)
    cluster.add("new")
    return cluster


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Nodes of the slots that were opened, one for each."""
    found = list[str]()
    plain = RemoteSlots.open

    def spy(others: RemoteSlots, info: SlotInfo) -> Any:
        found.append(info.node)
        return plain(others, info)

    monkeypatch.setattr(RemoteSlots, "open", spy)
    return found


CUT = Layout(dp=4, zero=1)
MINE = Shard("w", "float32", (ROWS, WIDTH), Box((9, 0), (12, WIDTH)))
"""Boxes of the last three shares."""


def test_only_the_shares_that_are_known_to_hold_its_boxes_are_opened(
    cluster: Cluster, opened: list[str]
) -> None:
    spec = shares(cluster).spec("new", wrote=CUT)
    cluster.holders = lambda wanted: {1, 2, 3}
    assert np.array_equal(cluster.restored(spec, 0, wanted=MINE), values()[9:21])
    assert len(opened) == 6
    assert {"b", "d"} < set(opened) <= {*"bcdef"}


def test_where_they_lack_something_the_others_are_looked_through(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    spec = shares(cluster).spec("new", wrote=CUT)
    cluster.holders = lambda wanted: {1}
    assert np.array_equal(cluster.restored(spec, 0, wanted=MINE), values()[9:21])
    assert [r.getMessage() for r in caplog.records if "others are tried" in r.getMessage()] == [
        "snapshots: shares [1] do not hold all; others are tried"
    ]


def test_then_a_lost_share_of_which_nothing_is_needed_is_passed_by(cluster: Cluster) -> None:
    """Nobody knew that it holds nothing of this member's; it was taken for the end of the state."""
    spec = shares(cluster).spec("new", wrote=CUT)
    cluster.holders = lambda wanted: {1}
    cluster.nodes["a"].service.close()
    assert np.array_equal(cluster.restored(spec, 0, wanted=MINE), values()[9:21])


def test_a_lost_share_is_read_from_the_nodes_with_copies_of_it(cluster: Cluster, opened: list[str]) -> None:
    spec = shares(cluster).spec("new", wrote=CUT)
    cluster.holders = lambda wanted: {1, 2, 3}
    for lost in "ce":
        cluster.nodes[lost].service.close()
    assert np.array_equal(cluster.restored(spec, 0, wanted=MINE), values()[9:21])
    assert "a" not in opened


@pytest.mark.parametrize("known", [{1, 2, 3}, {1}, set()], ids=str)
def test_a_share_without_another_copy_is_the_end_of_the_state(cluster: Cluster, known: set[int]) -> None:
    spec = shares(cluster).spec("new", wrote=CUT)
    cluster.holders = lambda wanted: known
    cluster.nodes["d"].service.close()
    with pytest.raises(SlotUnreachableError, match="no other node") as caught:
        cluster.restored(spec, 0, wanted=MINE)
    assert caught.value.where.startswith("d-")


def test_slots_that_do_not_say_their_share_are_read_whatever_was_computed(cluster: Cluster) -> None:
    """As those of a state that every worker wrote whole."""
    (node,) = cluster.add("a")
    node.write(0, 12, None)
    node.write(12, ROWS, None)
    cluster.add("new")
    cluster.holders = lambda wanted: {3}
    for rank in range(2):
        assert np.array_equal(cluster.restored(cluster.spec("a", "new"), rank), values())
