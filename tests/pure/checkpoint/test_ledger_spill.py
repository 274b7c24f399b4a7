"""Ledger of a long outage: snapshots carry a bounded part, the rest lies on disk and reaches the commit."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.shard_service.client import RemoteSlot, ShardClient
from picotron_ray.checkpoint.shard_service.server import ShardServer
from picotron_ray.checkpoint.snapshot import ledger_spill
from picotron_ray.checkpoint.snapshot.ledger_tail import LedgerTail
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.commit import commit
from picotron_ray.checkpoint.store.manifest import committed_manifest
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.checkpoint.store.upload import upload_slots
from picotron_ray.checkpoint.store.upload_part import UploadPart
from picotron_ray.checkpoint.store.verify import Verifier, read_ledger
from picotron_ray.errors import CorruptError, PartsGoneError, StorageError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.worker.remote_slots import fetch_spilled
from tests.support.checkpoint.checkpoint_kit import generation, ledger, make_state, write_slots

LINES = 4


def line(step: int) -> str:
    return ledger(step, step)[0]


def settled(tail: LedgerTail) -> LedgerTail:
    """The tail once nothing is being spilled."""
    while (thread := tail._spilling) is not None:
        thread.join()
    return tail


def grown(folder: Path, last: int, first: int = 1) -> LedgerTail:
    tail = LedgerTail(folder, LINES)
    for step in range(first, last + 1):
        tail.add(step, line(step))
        settled(tail)
    return tail


def names(folder: Path) -> list[tuple[int, int]]:
    return sorted(ledger_spill.steps_of(path.name) for path in folder.iterdir())


def test_a_tail_is_bounded_and_what_it_drops_is_on_disk(tmp_path: Path) -> None:
    tail = grown(tmp_path / "ledger", 30)
    assert len(tail.lines()) <= 2 * LINES + 1
    assert names(tmp_path / "ledger") == [(at, at + 3) for at in range(1, 25, 4)]
    newest, rest = ledger_spill.split_marker(tail.lines())
    texts = [text.decode() for _, text in ledger_spill.chain(tmp_path / "ledger", newest)]
    assert "".join(reversed(texts)).splitlines() + list(rest) == list(ledger(1, 30))


def test_every_rank_writes_the_same_files(tmp_path: Path) -> None:
    assert grown(tmp_path / "a", 30).lines() == grown(tmp_path / "b", 30).lines()


def test_a_commit_drops_lines_and_files(tmp_path: Path) -> None:
    tail = grown(tmp_path, 30)
    tail.committed(10)
    assert names(tmp_path)[0] == (9, 12), "it is needed in part"
    newest, _ = ledger_spill.split_marker(tail.lines())
    assert [ledger_spill.steps_of(name)[0] for name, _ in ledger_spill.chain(tmp_path, newest)][-1] == 9
    tail.committed(26)
    assert (names(tmp_path), tail.lines()) == ([], ledger(27, 30))


def test_a_tail_goes_on_from_what_a_snapshot_carried(tmp_path: Path) -> None:
    carried = grown(tmp_path, 30).lines()
    tail = LedgerTail(tmp_path, LINES)
    tail.restore(carried)
    for step in range(31, 41):
        tail.add(step, line(step))
        settled(tail)
    assert tail.lines() == grown(tmp_path / "other", 40).lines()


def test_a_disk_that_is_full_or_hangs_holds_no_step_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    tail = grown(tmp_path / "file" / "ledger", 20)
    assert tail.lines() == ledger(1, 20), "kept in memory, tried again with each step"
    gate = threading.Event()
    spill = ledger_spill.spill

    def hang(*words: Any) -> str:
        gate.wait(5)
        return spill(*words)

    monkeypatch.setattr(ledger_spill, "spill", hang)
    tail = LedgerTail(tmp_path / "ledger", LINES)
    for step in range(1, 21):
        tail.add(step, line(step))
    tail.committed(2)
    gate.set()
    settled(tail)
    assert tail.lines() == ledger(3, 20), "what a commit took meanwhile is not spilled"


def test_a_file_that_was_changed_is_refused(tmp_path: Path) -> None:
    newest, _ = ledger_spill.split_marker(grown(tmp_path, 30).lines())
    path = tmp_path / newest
    path.write_bytes(path.read_bytes().replace(b"loss", b"gain"))
    with pytest.raises(CorruptError, match="does not match its digest"):
        list(ledger_spill.chain(tmp_path, newest))
    with pytest.raises(CorruptError):
        ledger_spill.keep(tmp_path / "other", newest, path.read_bytes())


# --- to the commit -------------------------------------------------------------------------------------


class Run:
    """Commits of one generation whose slots carry a spilled tail."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.spilled = folder, folder / "spilled"
        self.storage = LocalStorage(str(folder / "runs"), "r1")
        self.log = RunLog(self.storage)
        self.log.claim_term("test")
        self.log.append("generation", generation(1, 1))

    def upload(self, tail: LedgerTail, step: int, spilled: Path | None) -> UploadPart:
        (self.folder / str(step)).mkdir(exist_ok=True)
        slots = write_slots(self.folder / str(step), make_state(step), Layout(), (1, 1, step), tail.lines())
        part = upload_slots(slots, self.storage, 1, 1, step, owner="n", spilled=spilled)
        return UploadPart.from_dict(json.loads(json.dumps(part.to_dict())))

    def committed(self) -> list[str]:
        """The ledger of the newest commit, which verifies."""
        entry = self.log.commits()[-1]
        assert Verifier(self.storage).check(entry).problems == ()
        return read_ledger(self.storage, committed_manifest(self.storage, entry.body))


@pytest.fixture
def run(memory_path: Path) -> Run:
    return Run(memory_path)


def test_a_commit_after_an_outage_has_all_lines(run: Run) -> None:
    tail = grown(run.spilled, 30)
    commit(run.storage, run.log, [run.upload(tail, 30, run.spilled)])
    assert run.committed() == list(ledger(1, 30))
    tail.committed(30)
    for step in range(31, 34):
        tail.add(step, line(step))
    commit(run.storage, run.log, [run.upload(tail, 33, run.spilled)])
    assert run.committed() == list(ledger(1, 33))


def test_a_commit_in_the_middle_of_a_file_takes_the_rest_of_it(run: Run) -> None:
    commit(run.storage, run.log, [run.upload(grown(run.folder / "first", 6), 6, run.folder / "first")])
    tail = grown(run.spilled, 30)  # its worker has not heard of that commit
    part = run.upload(tail, 30, run.spilled)
    assert [(each.first, each.last) for each in part.segments][:2] == [(1, 4), (5, 8)]
    commit(run.storage, run.log, [part])
    assert run.committed() == list(ledger(1, 30))
    run.storage.put(part.segments[1].key, b"x")
    run.log.append("generation", generation(1, 2, 6, (1, 1)))
    with pytest.raises(PartsGoneError, match="upload it again"):
        commit(run.storage, run.log, [replace(part, n=2)])


def test_a_manifest_that_is_damaged_later_takes_no_spilled_lines_along(run: Run) -> None:
    tail = grown(run.spilled, 30)
    done = commit(run.storage, run.log, [run.upload(tail, 30, run.spilled)])
    first = grown(run.folder / "first", 3)
    assert len(run.log.commits()[-1].body["segments"]) == 7
    run.storage.delete(done.manifest)
    tail.committed(30)
    tail.add(31, line(31))
    commit(run.storage, run.log, [run.upload(tail, 31, run.spilled)])  # the log names what was spilled
    assert run.committed() == list(ledger(1, 31))
    assert first.lines() == ledger(1, 3)


def test_lines_that_one_node_has_lost_come_from_another(run: Run) -> None:
    tail = grown(run.spilled, 30)
    bare, full = run.upload(tail, 30, run.folder / "none"), run.upload(tail, 30, run.spilled)
    with pytest.raises(StorageError, match=r"no ledger line of step 1, expected 1\.\.30"):
        commit(run.storage, run.log, [bare])
    commit(run.storage, run.log, [bare, full])
    assert run.committed() == list(ledger(1, 30))


def test_a_node_that_joins_takes_over_what_another_has_spilled(run: Run, tmp_path: Path) -> None:
    tail = grown(run.spilled, 30)
    slots = run.folder / "slots"
    slots.mkdir()
    (path,) = write_slots(slots, make_state(30), Layout(), (1, 1, 30), tail.lines())
    with (
        closing(ShardServer(slots, "127.0.0.1", 1.0, spilled=run.spilled)) as server,
        closing(ShardClient(lambda: server.endpoint, 1.0)) as client,
    ):
        slot = RemoteSlot(client, path.name, (1, 1, 30))
        fetch_spilled(slot, tmp_path / "mine")
        assert names(tmp_path / "mine") == names(run.spilled)
        assert slot.spilled("../runs") == b"", "of that folder, and of that kind alone"
        fetch_spilled(slot, Path("/proc/none"))  # no room here: the other node's copy has to do
        next(each for each in run.spilled.iterdir() if each.name.startswith("1-")).unlink()
        fetch_spilled(slot, tmp_path / "later")
        assert names(tmp_path / "later") == names(run.spilled), "the rest is committed by now"
        newest, _ = ledger_spill.split_marker(tail.lines())
        (run.spilled / newest).write_bytes(b"{}\nx\n")
        with pytest.raises(CorruptError) as caught:
            fetch_spilled(slot, tmp_path / "bad")
        assert caught.value.where == path.name
