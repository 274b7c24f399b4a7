"""Slots that storage could not take: what outlives a run, who takes it over, and what alone deletes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rich.console import Console

from picotron_ray.checkpoint.snapshot.ledger_spill import Spilled, marker, spill
from picotron_ray.checkpoint.snapshot.slot_sweep import owner
from picotron_ray.checkpoint.storage.open import open_storage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.service import ElasticConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.checkpoint_tracker import CheckpointTracker
from picotron_ray.coordinator.simulator.slots import SimSlot
from picotron_ray.errors import ConfigError, StorageError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.driver import control, snapshot_folder
from picotron_ray.runtime.driver.preflight import check_kept_elsewhere, check_same_run
from picotron_ray.runtime.driver.resolve_job import SAME_RUN, ResolvedJob, resolve
from picotron_ray.runtime.heartbeat import Page, process_start_ticks
from picotron_ray.runtime.node_agent.slot_release import release_slots, still_read
from picotron_ray.runtime.ray_cluster import cleanup, kept_slots, local_ray
from picotron_ray.runtime.ray_cluster.local_ray import LocalRay
from picotron_ray.runtime.ray_cluster.names import kept_index, ledger_folder, node_folder, run_folder
from picotron_ray.runtime.ray_cluster.node_facts import small_files_bytes
from tests.support.checkpoint.checkpoint_kit import make_state, write_slots
from tests.support.simulation.states import write_slot

OLD, NEW = ({"id": {"term": 1, "n": n}} for n in (1, 2))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))  # notes of where slots are kept
    return JobConfig.model_validate({"name": "night", "snapshot": {"folder": str(tmp_path)}})


def folder_of(job: JobConfig, node: str, **slots: int) -> Path:
    """A node's folder with a page, and slots of these steps that are kept."""
    folder = node_folder(job.snapshot.folder, job.name, node)
    folder.mkdir(parents=True)
    (folder / "w1.page").write_bytes(b"a page")
    for name in slots:
        (folder / f"{name}.slot").write_bytes(f"state of {node}".encode())
    if slots:
        kept_slots.mark(folder, {f"{name}.slot": step for name, step in slots.items()}, OLD)
    return folder


def there(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_stripped_folder_has_the_kept_slots_alone(job: JobConfig) -> None:
    folder = folder_of(job, "a", x=5)
    (folder / "other.slot").write_bytes(b"of no use")
    kept_slots.strip(folder)
    assert there(folder) == {"x.slot", kept_slots.MARKER}


def test_a_launch_clears_everything_else_of_a_dead_run(job: JobConfig) -> None:
    kept, other = folder_of(job, "a", x=5), folder_of(job, "b")
    cleanup.clear(job, None)
    assert there(kept) == {"x.slot", kept_slots.MARKER}
    assert not other.exists()


def test_what_was_spilled_of_kept_slots_goes_where_they_go(job: JobConfig) -> None:
    kept, other = folder_of(job, "a", x=5), folder_of(job, "b")
    name = spill(ledger_folder(kept), "", ["{}"], 1, 1)
    spill(ledger_folder(other), "", ["{}"], 1, 1)
    kept_slots.strip(kept)
    cleanup.clear(job, None)
    assert [ledger_folder(folder).exists() for folder in (kept, other)] == [True, False]
    mine = node_folder(job.snapshot.folder, job.name, "c")
    cleanup.claim(mine)
    assert there(ledger_folder(mine)) == {name}
    assert not ledger_folder(kept).exists()
    kept_slots.discard([mine.parent])
    assert not ledger_folder(mine).exists()


def test_a_release_sweeps_the_files_that_no_slot_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot that is older than the newest commit may be gone on from: its lines are to be had until then."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "run" / "node"
    folder.mkdir(parents=True)
    names: list[str] = []
    for first in (1, 5, 9):
        names.append(spill(ledger_folder(folder), names[-1] if names else "", ["{}"], first, first + 3))
    old = write_slots(folder, make_state(12), Layout(), (1, 1, 12), (marker(Spilled(names[-1], 5)),))
    release_slots(folder, (1, 1, 20), (), living={owner(old[0])}, committed=20)
    assert there(ledger_folder(folder)) == set(names[1:])
    old[0].unlink()
    release_slots(folder, (1, 1, 20), (), living={owner(old[0])}, committed=11)
    assert there(ledger_folder(folder)) == set(names[2:]), "its last step is not committed"
    release_slots(folder, (1, 1, 20), (), living={owner(old[0])}, committed=12)
    assert there(ledger_folder(folder)) == set()


def test_a_release_spares_kept_steps_that_are_not_done_again(tmp_path: Path) -> None:
    """The run went on from an older state while the node was away, and committed step 40 of that."""
    generation, states = m.GenerationId(2, 1), {"w1.0": 30, "w1.1": 50}
    for name, step in states.items():
        info = m.SlotInfo("a", name, generation, step, 0, (m.Fragment(0),))
        write_slot(tmp_path / f"{name}.slot", SimSlot(info, ((generation, 0, step),)), Layout(dp=1))
    kept_slots.mark(tmp_path, {f"{name}.slot": step for name, step in states.items()}, OLD)
    kept = [m.SlotInfo("a", f"{n}.slot", generation, step, 0, ()) for n, step in states.items()]
    release_slots(tmp_path, (3, 1, 40), kept, living=(), committed=40)
    assert there(tmp_path) == {"w1.1.slot", kept_slots.MARKER}
    release_slots(tmp_path, (3, 1, 50), kept[1:], living=(), committed=50)
    assert there(tmp_path) == set()


def test_a_release_spares_all_copies_that_the_newest_generation_reads(tmp_path: Path) -> None:
    """Each of its members reads those of its own node, until a state of its own is released."""
    one, two = m.GenerationId(1, 1), m.GenerationId(1, 2)
    for name, step in {"w1": 30, "w2": 40, "w3": 40}.items():
        info = m.SlotInfo("b", f"{name}.slot", one, step, 0, (m.Fragment(0),))
        write_slot(tmp_path / info.slot, SimSlot(info, ((one, 0, step),)), Layout(dp=1))
    anchor = m.SlotInfo("a", "w9.slot", one, 40, 0, (m.Fragment(0),))
    copies = (m.StateCopy("a", (0,), ("w9.slot",)), m.StateCopy("b", (0,), ("w2.slot", "w3.slot")))
    source = m.Source("slots", 40, one, (anchor,), layout=Layout(dp=1), copies=copies)
    newest = m.GenerationSpec(two, (m.Member("w4", "b"),), Layout(dp=1), source, "test")
    release_slots(tmp_path, (1, 1, 50), (), living=(), needed=still_read(newest, one), committed=50)
    assert there(tmp_path) == {"w2.slot", "w3.slot"}
    release_slots(tmp_path, (1, 2, 60), (), living=(), needed=still_read(newest, two), committed=60)
    assert there(tmp_path) == set()


def test_the_release_of_a_void_state_spares_kept_steps_that_were_never_committed(tmp_path: Path) -> None:
    """The run went on from step 30, and its own step 50 became void: nothing has replaced the kept 40."""
    generation, tracker = m.GenerationId(2, 1), CheckpointTracker(10.0, committed=30)
    info = m.SlotInfo("a", "w1.0.slot", generation, 40, 0, (m.Fragment(0),))
    write_slot(tmp_path / info.slot, SimSlot(info, ((generation, 0, 40),)), Layout(dp=1))
    kept_slots.mark(tmp_path, {info.slot: 40}, OLD)
    tracker.voided("a", (50, m.GenerationId(3, 1)))
    (freed,) = tracker.release_void()
    state = freed.generation.term, freed.generation.n, freed.step
    release_slots(tmp_path, state, [info], living=(), committed=freed.committed)
    assert there(tmp_path) == {info.slot, kept_slots.MARKER}


def test_a_new_agent_takes_over_what_dead_ones_kept(job: JobConfig) -> None:
    a, b = folder_of(job, "a", x=5), folder_of(job, "b", y=5, z=4)
    kept_slots.mark(b, {"y.slot": 5, "z.slot": 4}, NEW)
    (b / cleanup.SIGNATURE).write_text("4194305 77")  # above any pid
    mine = node_folder(job.snapshot.folder, job.name, "mine")
    cleanup.claim(mine)
    assert kept_slots.read_marker(mine) == {
        "slots": {"x.slot": 5, "y.slot": 5, "z.slot": 4}, "spec": NEW, "run": ""
    }  # fmt: skip
    assert (mine / "y.slot").read_bytes() == b"state of b"
    assert not a.exists()
    assert not b.exists()
    cleanup.claim(mine)
    assert (mine / "x.slot").exists(), "an agent's constructor may run again"


def test_a_take_over_that_was_cut_short_is_finished_by_the_next(job: JobConfig) -> None:
    a = folder_of(job, "a", x=5, y=5)
    first = node_folder(job.snapshot.folder, job.name, "first")
    first.mkdir()
    kept_slots.mark(first, {"x.slot": 5, "y.slot": 5}, OLD)
    (a / "x.slot").rename(first / "x.slot")
    mine = node_folder(job.snapshot.folder, job.name, "mine")
    cleanup.claim(mine)
    assert {"x.slot", "y.slot"} < there(mine)


def test_what_a_living_node_marked_is_its_own(job: JobConfig) -> None:
    signed, worked = folder_of(job, "a", x=5), folder_of(job, "b", y=5)
    (signed / cleanup.SIGNATURE).write_text(f"{os.getpid()} {process_start_ticks(os.getpid())}")
    Page(worked / "w1.page", ElasticConfig())  # of this very process
    mine = node_folder(job.snapshot.folder, job.name, "mine")
    cleanup.claim(mine)
    assert there(mine) == {cleanup.SIGNATURE}
    assert (signed / "x.slot").exists()
    assert (worked / "y.slot").exists()


def test_what_is_let_go_is_unmarked_first_and_the_marker_goes_with_the_last(job: JobConfig) -> None:
    folder = folder_of(job, "a", x=5, y=4)
    kept_slots.let_go(folder, ["y.slot"], ["y.slot"])
    assert kept_slots.read_marker(folder) == {"slots": {"x.slot": 5}, "spec": OLD, "run": ""}
    assert not (folder / "y.slot").exists()
    kept_slots.let_go(folder, ["x.slot"], [])
    kept_slots.let_go(folder, ["x.slot"], [])
    assert kept_slots.read_marker(folder) is None
    assert (folder / "x.slot").exists(), "its worker lives"


def test_slots_of_another_run_of_the_name_are_told_apart_and_not_mixed(job: JobConfig) -> None:
    folder, other = folder_of(job, "a", x=5), folder_of(job, "b", y=9)
    runs = [folder.parent]
    assert kept_slots.foreign_step(runs, "this") is None, "an older version did not say whose they are"
    kept_slots.mark(folder, {"x.slot": 5}, OLD, "this")
    kept_slots.mark(other, {"y.slot": 9}, OLD, "another")
    assert kept_slots.foreign_step(runs, "this") == 9
    assert kept_slots.foreign_step(runs, "another") == 5
    assert kept_slots.foreign_step(runs, "") is None
    kept_slots.take_over(folder, other)
    assert (other / "y.slot").exists()
    kept_slots.mark(folder, {"x.slot": 5, "w.slot": 4}, OLD, "this")
    kept_slots.let_go(folder, ["w.slot"], [])
    marker = kept_slots.read_marker(folder)
    assert marker is not None
    assert (marker["slots"], marker["run"]) == ({"x.slot": 5}, "this")
    mine = node_folder(job.snapshot.folder, job.name, "mine")
    mine.mkdir()
    kept_slots.take_over(mine, folder)
    assert kept_slots.read_marker(mine) == marker


def test_a_launch_in_other_storage_is_refused_while_slots_of_that_name_are_kept(
    job: JobConfig, tmp_path: Path
) -> None:
    job = job.model_copy(update={"storage": job.storage.model_copy(update={"url": str(tmp_path / "one")})})
    storage = open_storage(job.storage, job.name)
    log = RunLog(storage)
    log.claim_term("here")
    log.claim_term("there")
    assert log.identity
    folder = folder_of(job, "a", x=40)
    kept_slots.mark(folder, {"x.slot": 40}, OLD, log.identity)
    assert check_same_run(job, storage) == []
    elsewhere = open_storage(job.storage.model_copy(update={"url": str(tmp_path / "two")}), job.name)
    with pytest.raises(
        ConfigError, match=r"storage.url: saw nothing of run .*two.* step 40 .*restore it.*stop .* --discard"
    ):
        check_same_run(job, elsewhere)
    RunLog(elsewhere).claim_term("a run of its own")
    with pytest.raises(
        ConfigError, match=r"name: saw step 40 kept in memory of a run .* not the one in storage"
    ):
        check_same_run(job, elsewhere)
    kept_slots.discard([folder.parent])
    assert check_same_run(job, elsewhere) == []


def test_a_launch_with_another_snapshot_folder_is_refused_while_a_newer_state_is_kept(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    job = job.model_copy(update={"storage": job.storage.model_copy(update={"url": str(tmp_path / "one")})})
    storage = open_storage(job.storage, job.name)
    log = RunLog(storage)
    log.claim_term("here")
    folder = folder_of(job, "a", x=40)
    kept_slots.mark(folder, {"x.slot": 40}, OLD, log.identity)
    check_kept_elsewhere(job, storage, own_ray=True)
    moved = job.model_copy(
        update={"snapshot": job.snapshot.model_copy(update={"folder": str(tmp_path / "new")})}
    )
    both = {"folder": str(tmp_path / "new"), "overflow_folder": str(tmp_path)}
    check_kept_elsewhere(
        job.model_copy(update={"snapshot": job.snapshot.model_copy(update=both)}), storage, True
    )
    with pytest.raises(ConfigError) as caught:
        resolve(ResolvedJob(moved, owns_ray=True), (SAME_RUN,))
    assert str(caught.value) == (
        f"snapshot.folder: saw {tmp_path / 'new'}, but an earlier launch of run 'night' kept step 40, which"
        f" is not committed, in {tmp_path}; launch with snapshot.folder={tmp_path} to commit it, or delete"
        " it with `picotron-ray stop night --discard`"
    )
    log.append("generation", {"term": log.term, "n": 1})
    log.append("commit", {"term": log.term, "n": 1, "step": 40, "manifest": "m"})
    check_kept_elsewhere(moved, storage, own_ray=True)
    elsewhere = moved.storage.model_copy(update={"url": str(tmp_path / "two")})
    check_kept_elsewhere(moved, open_storage(elsewhere, job.name), own_ray=True)


def test_a_stop_with_discard_deletes_what_is_kept_in_any_folder(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder = folder_of(job, "a", x=40)
    with pytest.raises(StorageError, match="keeps step 40"):
        control.stop("night", now=False, console=Console())
    assert control.stop("night", now=True, console=Console(), discard=True) == (0, None)
    assert not folder.exists()


def test_a_marker_names_files_of_its_own_folder_alone(job: JobConfig) -> None:
    folder = folder_of(job, "a")
    kept_slots.mark(folder, {"../b/x.slot": 5, "x.slot": 4}, None)
    assert kept_slots.read_marker(folder) == {"slots": {"x.slot": 4}, "spec": None, "run": ""}


def test_the_end_of_a_local_ray_spares_them_and_remembers_where_they_are(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(local_ray.processes, "end_all", lambda *_: [])
    kept, other = folder_of(job, "a", x=5), folder_of(job, "b")
    run = run_folder(job.snapshot.folder, job.name)
    ray = LocalRay("night", "mark", 1, "", str(tmp_path / "ray"), "", (str(run),))
    local_ray.save(ray)
    local_ray.stop(ray)
    assert (kept / "x.slot").exists()
    assert not other.exists()
    assert local_ray.find("night") == ray
    assert kept_slots.kept_step([run]) == 5
    local_ray.stop(ray, discard=True)
    assert not run.exists()
    assert local_ray.find("night") is None
    assert kept_slots.kept_step([run]) is None


def test_kept_slots_count_as_room_for_those_of_the_next_launch(
    job: JobConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        snapshot_folder, "choose_folder", lambda folder, overflow, need: asked.append(need) or (folder, "")
    )
    assert snapshot_folder.overflow_here(job, 2, 5000) == (False, None)
    folder = folder_of(job, "a", x=5)
    (folder / "x.slot").write_bytes(bytes(1000))
    (folder_of(job, "b") / "y.slot").write_bytes(bytes(77))
    snapshot_folder.overflow_here(job, 2, 5000)
    need = job.snapshot.slots * 10_000 + small_files_bytes(job, 2)
    assert asked == [need, need - 1000]


def test_a_run_that_lives_elsewhere_is_refused_with_its_kept_slots_in_place(job: JobConfig) -> None:
    folder = folder_of(job, "a", x=5)
    Page(folder / "w1.page", ElasticConfig())
    with pytest.raises(ConfigError, match="in use"):
        cleanup.clear(job, None)
    assert (folder / "x.slot").exists()


def test_a_node_says_what_it_keeps_and_deletes_it_when_told(job: JobConfig) -> None:
    folder_of(job, "a", x=5, y=6)
    folder, other = run_folder(job.snapshot.folder, job.name), run_folder(job.snapshot.folder, "day")
    (other / "n").mkdir(parents=True)
    kept_slots.mark(other / "n", {"w.slot": 9}, None)
    # the caller does not know where: `stop` has no config
    for base in (job.snapshot.folder, "/nowhere"):
        assert kept_slots.kept_here(job.name, base, False) == 6
    assert kept_slots.kept_here(job.name, "/nowhere", True) == 6
    assert not folder.exists()
    assert kept_slots.kept_here(job.name, "/nowhere", True) is None
    assert list(kept_index(job.name).iterdir()) == []
    assert kept_slots.kept_here("day", "/nowhere", False) == 9


def test_a_note_of_where_slots_are_is_believed_for_that_run_alone(job: JobConfig, tmp_path: Path) -> None:
    victim = folder_of(job, "a", x=5).parent
    index = kept_index("day")
    index.mkdir(parents=True)
    (index / "planted").write_text(str(victim))
    assert kept_slots.kept_here("day", str(tmp_path), True) is None
    assert victim.exists()


def test_slots_are_kept_where_no_note_can_be_left(
    job: JobConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    folder = folder_of(job, "a", x=5)
    assert kept_slots.kept_step([folder.parent]) == 5
    assert "which only a launch will find" in caplog.text
