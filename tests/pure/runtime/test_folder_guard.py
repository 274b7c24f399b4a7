"""A node's folder that is deleted under living workers: real files, and processes that hold them open."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.errors import PicotronError, SlotError
from picotron_ray.runtime.heartbeat import PageView, read_page
from picotron_ray.runtime.node_agent import folder_guard, slot_rescue
from picotron_ray.runtime.node_agent.folder_guard import FolderGuard, Rescue
from picotron_ray.runtime.node_agent.slot_rescue import HeldSlot, Move, in_order
from picotron_ray.runtime.ray_cluster import cleanup, private_folder
from tests.support.faults.full_folder import run_on_small_disk

WORKER = """
import sys, time
from pathlib import Path
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader
from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.heartbeat import Page
folder = Path(sys.argv[1])
page = Page(folder / "w1-1.page", ElasticConfig())
slots = [SlotFile.create(folder / f"w1-1.{index}.slot", 4096) for index in range(3)]
for slot, step in zip(slots, (6, 7)):
    header = SlotHeader(1, 1, step, 0, (("", 0, 1),), Layout().to_dict(), 8 * step, ())
    slot.write(header, (), (), pinned=False)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(folder_guard, "SETTLED_S", 0.0)
    monkeypatch.setattr(folder_guard, "AGAIN_S", 0.0)
    node = private_folder.user_folder(tmp_path) / "night" / "node"
    cleanup.claim(node)
    return node


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What a rescue copies waits for this event."""
    go_on, copy = threading.Event(), Move._copy

    def wait(self: Move, *words: Any) -> None:
        assert go_on.wait(60.0)
        copy(self, *words)

    monkeypatch.setattr(Move, "_copy", wait)
    yield go_on
    go_on.set()


@pytest.fixture
def worker(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a page, two sealed slots and one that is not, of steps 6 and 7."""
    command = [sys.executable, "-c", WORKER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def guard(folder: Path) -> FolderGuard:
    made = FolderGuard(folder, lambda: cleanup.claim(folder))
    assert made.look(pages(folder), 0.0) is False
    return made


def pages(folder: Path) -> list[PageView]:
    return [page for path in folder.glob("*.page") if (page := read_page(path)) is not None]


def rescued(made: FolderGuard, folder: Path) -> Rescue:
    """What was done, once it is."""
    deadline = time.monotonic() + 60.0
    while (done := made.done()) is None:
        assert time.monotonic() < deadline
        made.look(pages(folder), time.monotonic())
        time.sleep(0.01)
    return done


def test_a_deleted_folder_is_made_anew_with_what_its_workers_hold_open(
    folder: Path, worker: subprocess.Popen[str]
) -> None:
    made = guard(folder)
    before = {path.name: path.read_bytes() for path, _ in list_slots(folder)}
    shutil.rmtree(folder.parent)
    assert made.look(pages(folder), 1.0) is True
    done = rescued(made, folder)
    assert done.ended == ("w1-1",)
    assert (
        f"snapshot.folder: {folder} was deleted while the run uses it; it is made anew, 2 slots" in done.text
    )
    assert worker.wait(timeout=60) == -9, "nobody would see its page and slots any more"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [(path.name, header.step) for path, header in list_slots(folder)] == [
        ("w1-1.0.slot", 6),
        ("w1-1.1.slot", 7),
    ]
    assert {path.name: path.read_bytes() for path, _ in list_slots(folder)} == before
    assert made.look([], 2.0) is False
    assert made.done() is None


def test_a_single_page_that_is_deleted_counts_and_slots_that_are_there_stay(
    folder: Path, worker: subprocess.Popen[str]
) -> None:
    made = guard(folder)
    (folder / "w1-1.page").unlink()
    assert "0 slots are saved, and workers w1-1 are started again" in rescued(made, folder).text
    assert worker.wait(timeout=60) == -9
    assert len(list_slots(folder)) == 2


def test_a_folder_of_somebody_else_is_not_used_and_costs_no_worker(
    folder: Path, worker: subprocess.Popen[str], tmp_path: Path
) -> None:
    made = guard(folder)
    shutil.rmtree(folder.parent)
    (tmp_path / "theirs").mkdir()
    folder.parent.symlink_to(tmp_path / "theirs")
    told = rescued(made, folder)
    assert "as a link, expected a folder of user" in told.text
    assert "training goes on, but nothing is committed until it can" in told.text
    for _ in range(20):
        made.look(pages(folder), time.monotonic())
        time.sleep(0.01)
        assert made.done() is None, "told once"
    assert worker.poll() is None
    assert list((tmp_path / "theirs").iterdir()) == []
    folder.parent.unlink()
    assert "made anew, 2 slots" in rescued(made, folder).text


def test_a_worker_that_died_is_no_loss_of_the_folder(folder: Path, worker: subprocess.Popen[str]) -> None:
    made = guard(folder)
    worker.kill()
    worker.wait()
    (folder / "w1-1.page").unlink()
    assert made.look([], 1.0) is False


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_without_any_room_saves_nothing(
    folder: Path, worker: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = guard(folder)
    shutil.rmtree(folder)
    monkeypatch.setattr(slot_rescue.os, "pwrite", full)
    assert "0 slots are saved" in rescued(made, folder).text
    assert [path.name for path in folder.iterdir()] == ["agent"]


def test_where_room_is_short_older_states_give_theirs(
    folder: Path, worker: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, write = guard(folder), os.pwrite
    newest = (folder / "w1-1.1.slot").read_bytes()
    before = sum(path.stat().st_blocks for path in folder.glob("*.slot"))
    slots: list[HeldSlot] = []
    opened, taken = slot_rescue.held_slots, []
    monkeypatch.setattr(slot_rescue, "held_slots", lambda *words: slots.extend(opened(*words)) or slots)
    monkeypatch.setattr(HeldSlot, "drop", lambda self: taken.append(self.name))
    monkeypatch.setattr(
        slot_rescue.os, "pwrite", lambda *words: write(*words) if "w1-1.0.slot" in taken else full()
    )
    assert before > 0
    shutil.rmtree(folder)
    assert "1 slots are saved" in rescued(made, folder).text
    assert taken == ["w1-1.2.slot", "w1-1.0.slot"], "what is not sealed, then the older state"
    assert {path.name for path in folder.glob("*.slot")} == {"w1-1.1.slot"}
    assert (folder / "w1-1.1.slot").read_bytes() == newest


EXACT = """
import json, shutil, subprocess, sys, time
from picotron_ray.runtime.node_agent import folder_guard, slot_rescue
from picotron_ray.runtime.heartbeat import read_page
from picotron_ray.checkpoint.snapshot.slot_reader import verify
from picotron_ray.runtime.ray_cluster import cleanup, private_folder
folder_guard.SETTLED_S, slot_rescue.PART_BYTES, slot_rescue.PIECE_BYTES = 0.0, PART, 4 * PART
node = private_folder.user_folder(folder) / "night" / "node"
cleanup.claim(node)
command = [sys.executable, "-c", WORKER, str(node)]
workers = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in ("w1", "w2")]
assert [worker.stdout.readline().strip() for worker in workers] == ["ready"] * 2
guard = folder_guard.FolderGuard(node, lambda: cleanup.claim(node))
pages = lambda: [page for path in node.glob("*.page") if (page := read_page(path)) is not None]
guard.look(pages(), 0.0)
fill(folder)
shutil.rmtree(node)
until = time.monotonic() + 60.0
while (done := guard.done()) is None and time.monotonic() < until:
    guard.look(pages(), time.monotonic())
    time.sleep(0.01)
for worker in workers:
    worker.kill()
print(json.dumps([done.text, {p.name: verify(p).header.step for p in sorted(node.glob("*.slot"))}]))
"""
LARGE = """
import sys, time
from pathlib import Path
from picotron_ray.checkpoint.snapshot.slot_file import SlotFile
from picotron_ray.checkpoint.snapshot.slot_format import SlotHeader, slot_bytes
from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.shards import Box, Shard
from picotron_ray.runtime.heartbeat import Page
folder, name = Path(sys.argv[1]), sys.argv[2]
page = Page(folder / f"{name}.page", ElasticConfig())
shard = Shard("w", "float32", (2 << 18,), Box((0,), (2 << 18,)))
slots = [SlotFile.create(folder / f"{name}.{i}.slot", slot_bytes([shard])) for i in range(3)]
for slot, step in zip(slots, (6, 7, 8)):
    header = SlotHeader(1, 1, step, 0, (("", 0, 1),), Layout().to_dict(), 8 * step, ())
    slot.write(header, [shard], [bytes([step]) * shard.nbytes])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("part", [64 << 10, 16 << 20])
def test_an_exactly_sized_memory_file_system_suffices(tmp_path: Path, part: int) -> None:
    """For real, where mounts are permitted: six sealed slots take it all, and deleted they still do."""
    code = f"PART, WORKER = {part}, {LARGE!r}\n{EXACT}"
    text, steps = json.loads(run_on_small_disk(tmp_path, code))
    saved = [f"w{worker}.{index}.slot" for worker in (1, 2) for index in (1, 2)]
    assert {name: step for name, step in steps.items() if step > 6} == dict(
        zip(saved, (7, 8) * 2, strict=True)
    )
    assert len(steps) == 5, "one of the oldest gave its room"
    assert "5 slots are saved" in text


def held(name: str, pid: int, step: int | None, n: int = 1) -> HeldSlot:
    return HeldSlot(name, pid, -1, None if step is None else (1, n, step))


@pytest.mark.parametrize(
    ("slots", "names"),
    [
        ([held("a7", 1, 7), held("a8", 1, 8), held("b7", 2, 7), held("b6", 2, 6)], ["7", "7", "8", "6"]),
        ([held("a8", 1, 8), held("a9", 1, None), held("b8", 2, 8), held("b7", 2, 7)], ["8", "8", "7"]),
        ([held("a7", 1, 7), held("a8", 1, 8, n=2), held("b7", 2, 7)], ["8", "7", "7"]),
        ([], []),
    ],
)
def test_the_newest_state_that_all_have_sealed_comes_first(slots: list[HeldSlot], names: list[str]) -> None:
    assert [slot.name[1:] for slot in in_order(slots)] == names


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until(made: FolderGuard, folder: Path, reached: Callable[[], bool]) -> None:
    """Look until it is so."""
    deadline = time.monotonic() + 60.0
    while not reached():
        assert time.monotonic() < deadline
        made.look(pages(folder), time.monotonic())
        time.sleep(0.01)


def test_heartbeats_name_who_is_rescued_until_it_is_done(
    folder: Path, worker: subprocess.Popen[str], blocked: threading.Event
) -> None:
    made = guard(folder)
    (seen,) = pages(folder)
    assert made.figures([seen]) == [seen.figures()]
    shutil.rmtree(folder)
    until(made, folder, lambda: state_of(worker.pid) == "T")
    assert made.rescued == {"w1-1"}
    (told,) = made.figures(pages(folder))
    assert told == seen.figures() | {"rescued": True}, "its page is read where it is open"
    assert made.forsaken() == [], "it stands still for a reason"
    with pytest.raises(SlotError, match="slots of w1-1 are being saved"):
        made.check_saved()
    assert made.done() is None
    assert worker.poll() is None
    blocked.set()
    assert "2 slots are saved" in rescued(made, folder).text
    assert (worker.wait(timeout=60), made.rescued) == (-9, frozenset())
    made.look([], time.monotonic())
    assert made.figures([]) == []
    made.check_saved()


def test_a_worker_that_dies_meanwhile_loses_no_slot(
    folder: Path, worker: subprocess.Popen[str], blocked: threading.Event
) -> None:
    made = guard(folder)
    shutil.rmtree(folder)
    until(made, folder, lambda: state_of(worker.pid) == "T")
    time.sleep(0.2)  # the files are opened at once
    worker.kill()
    worker.wait()
    until(made, folder, lambda: made.robbed() == [])
    assert made.figures([]) == [{"worker": "w1-1", "rescued": True}], "who asks for its slots has to wait"
    blocked.set()
    assert "2 slots are saved" in rescued(made, folder).text


def test_a_rescue_has_the_time_of_its_bytes_at_most(
    folder: Path, worker: subprocess.Popen[str], blocked: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_rescue, "LEAST_S", 0.2)
    made = guard(folder)
    shutil.rmtree(folder)
    until(made, folder, lambda: state_of(worker.pid) == "T")
    until(made, folder, lambda: made.rescued == frozenset())
    assert worker.poll() is None, "its thread hangs; others may kill it now"
    blocked.set()
    assert "1 slots are saved" in rescued(made, folder).text
    assert worker.wait(timeout=60) == -9
    large = [held("w.0.slot", 1, 8)]
    monkeypatch.setattr(HeldSlot, "size", int(slot_rescue.SLOWEST_BYTES_PER_S) * 60)
    assert slot_rescue.limit_s(large) == pytest.approx(60.2)


def test_an_end_of_the_run_waits_for_no_rescue(
    folder: Path, worker: subprocess.Popen[str], blocked: threading.Event
) -> None:
    made = guard(folder)
    shutil.rmtree(folder)
    until(made, folder, lambda: state_of(worker.pid) == "T")
    threading.Timer(0.3, blocked.set).start()
    made.close()
    done = made.done()
    assert done is not None
    assert "2 slots are saved" not in done.text, "but for what is under way"
    assert worker.wait(timeout=60) == -9


def test_workers_of_a_folder_that_cannot_be_made_are_seen_as_ever(
    folder: Path, worker: subprocess.Popen[str]
) -> None:
    def refuse() -> None:
        raise PicotronError("no rights")

    made = FolderGuard(folder, refuse)
    made.look(seen := pages(folder), 0.0)
    shutil.rmtree(folder)
    assert "training goes on" in rescued(made, folder).text
    for _ in range(5):
        made.look([], time.monotonic())
        made.done()
    assert made.rescued == frozenset()
    assert made.figures([]) == [page.figures() for page in seen]
    assert made.forsaken() == made.robbed() == seen, "where one hangs that is told"
    made.check_saved()
    assert worker.poll() is None
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    made.look([], time.monotonic())
    assert made.figures([]) == []


def test_a_claim_that_fails_is_told_with_its_reason(folder: Path) -> None:
    def refuse() -> None:
        raise PicotronError("no rights")

    made = FolderGuard(folder, refuse)
    shutil.rmtree(folder)
    assert "cannot be made anew: no rights" in rescued(made, folder).text
