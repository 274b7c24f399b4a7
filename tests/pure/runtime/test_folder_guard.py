"""A node's folder that is deleted under living workers: real files, and processes that hold them open."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.errors import PicotronError
from picotron_ray.runtime.heartbeat import PageView, read_page
from picotron_ray.runtime.node_agent import folder_guard
from picotron_ray.runtime.node_agent.folder_guard import FolderGuard, Rescue
from picotron_ray.runtime.ray_cluster import cleanup, private_folder

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


def test_a_folder_without_room_saves_what_fits(
    folder: Path, worker: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    made = guard(folder)
    shutil.rmtree(folder)
    monkeypatch.setattr(folder_guard.shutil, "copyfileobj", full)
    assert "0 slots are saved" in rescued(made, folder).text
    assert [path.name for path in folder.iterdir()] == ["agent"]


def test_a_claim_that_fails_is_told_with_its_reason(folder: Path) -> None:
    def refuse() -> None:
        raise PicotronError("no rights")

    made = FolderGuard(folder, refuse)
    shutil.rmtree(folder)
    assert "cannot be made anew: no rights" in rescued(made, folder).text
