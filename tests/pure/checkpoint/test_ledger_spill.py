"""Ledger of a long outage: snapshots carry a bounded part, the rest lies on disk and reaches the commit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
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
from picotron_ray.errors import CorruptError, LedgerGoneError, PartsGoneError
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


def chain(folder: Path, tail: LedgerTail) -> list[tuple[str, bytes]]:
    """Files that a tail names, the newest first, as far back as it says."""
    (name, first), _ = ledger_spill.split_marker(tail.lines())
    found: list[tuple[str, bytes]] = []
    while name and not (found and ledger_spill.steps_of(found[-1][0])[0] <= first):
        after, lines = ledger_spill.read(folder, name)
        found.append((name, lines))
        name = after
    return found


def test_a_tail_is_bounded_and_what_it_drops_is_on_disk(tmp_path: Path) -> None:
    tail = grown(tmp_path / "ledger", 30)
    assert len(tail.lines()) <= 2 * LINES + 1
    assert names(tmp_path / "ledger") == [(at, at + 3) for at in range(1, 25, 4)]
    _, rest = ledger_spill.split_marker(tail.lines())
    texts = [text.decode() for _, text in chain(tmp_path / "ledger", tail)]
    assert "".join(reversed(texts)).splitlines() + list(rest) == list(ledger(1, 30))


def test_every_rank_writes_the_same_files(tmp_path: Path) -> None:
    assert grown(tmp_path / "a", 30).lines() == grown(tmp_path / "b", 30).lines()


def test_a_commit_drops_lines_and_files(tmp_path: Path) -> None:
    tail = grown(tmp_path, 30)
    tail.committed(10)
    ledger_spill.sweep(tmp_path, 10, [tail.lines()])
    assert names(tmp_path)[0] == (9, 12), "it is needed in part"
    assert ledger_spill.steps_of(chain(tmp_path, tail)[-1][0])[0] == 9
    tail.committed(26)
    ledger_spill.sweep(tmp_path, 26, [tail.lines()])
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
    tail = grown(tmp_path, 30)
    newest = ledger_spill.split_marker(tail.lines())[0].name
    path = tmp_path / newest
    path.write_bytes(path.read_bytes().replace(b"loss", b"gain"))
    with pytest.raises(CorruptError, match="does not match its digest"):
        chain(tmp_path, tail)
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

    def upload(self, tail: LedgerTail, step: int, spilled: Path | None, n: int = 1) -> UploadPart:
        (self.folder / str(step)).mkdir(exist_ok=True)
        slots = write_slots(self.folder / str(step), make_state(step), Layout(), (1, n, step), tail.lines())
        part = upload_slots(slots, self.storage, 1, n, step, owner="n", spilled=spilled)
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
    with pytest.raises(LedgerGoneError, match=r"no ledger line of step 1, expected 1\.\.30"):
        commit(run.storage, run.log, [bare])
    commit(run.storage, run.log, [bare, full])
    assert run.committed() == list(ledger(1, 30))


def test_lines_come_from_another_node_that_has_cut_them_elsewhere(run: Run) -> None:
    """Nodes that heard of a commit at different times have spilled at different steps."""
    whole = run.upload(grown(run.folder / "mine", 30), 30, run.folder / "mine")
    later = run.upload(grown(run.folder / "theirs", 30, first=3), 30, run.folder / "theirs")
    assert [each.first for each in later.segments][:2] == [3, 7]
    commit(run.storage, run.log, [replace(whole, segments=whole.segments[:1], ledger=()), later])
    assert run.committed() == list(ledger(1, 30))


def rewound(run: Run, swept: Callable[[tuple[str, ...]], object]) -> LedgerTail:
    """The tail at step 33 of a generation that went back to step 24, behind the commit of step 30.

    Args:
        swept: called once that commit is known, with the ledger of the slot of step 24.
    """
    tail = grown(run.spilled, 24)
    slot = tail.lines()
    for step in range(25, 31):
        tail.add(step, line(step))
        settled(tail)
    commit(run.storage, run.log, [run.upload(tail, 30, run.spilled)])
    tail.committed(30)
    swept(slot)
    run.log.append("generation", generation(1, 2, 24, (1, 1)))
    tail = LedgerTail(run.spilled, LINES)
    tail.restore(slot)
    for step in range(25, 34):
        tail.add(step, line(step))
        settled(tail)
    return tail


def test_files_that_a_slot_behind_the_newest_commit_names_stay(run: Run) -> None:
    tail = rewound(run, lambda slot: ledger_spill.sweep(run.spilled, 30, [(), ledger(28, 30), slot]))
    assert names(run.spilled)[0] == (1, 4)
    for path in run.storage.list("ledger/spilled/"):
        run.storage.delete(path.key)  # the files alone will do
    commit(run.storage, run.log, [run.upload(tail, 33, run.spilled, n=2)])
    assert run.committed() == list(ledger(1, 33))


def test_a_rewind_behind_the_newest_commit_finds_what_was_swept_in_storage(run: Run) -> None:
    def all_gone(_: object) -> None:
        ledger_spill.sweep(run.spilled, 30, [])
        assert names(run.spilled) == []

    tail = rewound(run, all_gone)
    commit(run.storage, run.log, [run.upload(tail, 33, run.spilled, n=2)])
    assert run.committed() == list(ledger(1, 33))


def test_an_object_that_is_not_the_file_it_is_named_after_is_no_ledger(run: Run) -> None:
    tail = rewound(run, lambda _: ledger_spill.sweep(run.spilled, 30, []))
    victim = next(found.key for found in run.storage.list("ledger/spilled/9-12-"))
    run.storage.put(victim, b"".join(f"{line(step)[:-1]} }}\n".encode() for step in range(9, 13)))
    part = run.upload(tail, 33, run.spilled, n=2)
    assert part.segments[0].first == 13
    with pytest.raises(LedgerGoneError, match="no ledger line of step 1,"):
        commit(run.storage, run.log, [part])


def test_what_was_committed_before_the_slot_is_not_looked_for(run: Run) -> None:
    tail = grown(run.spilled, 30)
    tail.committed(10)
    part = run.upload(tail, 30, run.spilled)
    assert part.segments[0].first == 9
    restored = LedgerTail(run.spilled, LINES)
    restored.restore(tail.lines())
    assert restored.lines() == tail.lines()


def test_a_commit_without_lines_that_nobody_has_says_so(run: Run) -> None:
    """The state is as good as ever; of a step that nothing proves, nothing is claimed."""
    tail = grown(run.spilled, 30)
    lost = next(path for path in run.spilled.iterdir() if path.name.startswith("9-12-"))
    lost.unlink()
    part = run.upload(tail, 30, run.spilled)
    with pytest.raises(LedgerGoneError):
        commit(run.storage, run.log, [part])
    assert run.log.commits() == []
    done = commit(run.storage, run.log, [part], unproven=True)
    assert done.unproven == run.log.commits()[-1].body["unproven"] == "1 to 12"
    lines = run.committed()
    assert lines[12:] == list(ledger(13, 30))
    steps = [json.loads(text) for text in lines[:12]]
    assert [each["step"] for each in steps] == list(range(1, 13))
    assert all(each["unproven"] and each["rows"] == [] for each in steps)
    for step in range(31, 34):
        tail.add(step, line(step))
    tail.committed(30)
    assert commit(run.storage, run.log, [run.upload(tail, 33, run.spilled)]).unproven == ""
    assert run.committed() == [*lines, *ledger(31, 33)]


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
        newest = ledger_spill.split_marker(tail.lines())[0].name
        (run.spilled / newest).write_bytes(b"{}\nx\n")
        with pytest.raises(CorruptError) as caught:
            fetch_spilled(slot, tmp_path / "bad")
        assert caught.value.where == path.name
