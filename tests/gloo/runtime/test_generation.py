"""A worker's generation in itself: what it makes of the source that its spec names."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from picotron_ray.checkpoint.snapshot.ledger_tail import LedgerTail
from picotron_ray.checkpoint.snapshot.slot_format import slot_bytes
from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.manifest import INITIAL_WEIGHTS, UPDATES
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.coordinator.messages import (
    ExpertLoads,
    GenerationId,
    GenerationSpec,
    Member,
    Outcome,
    SlotInfo,
    Source,
)
from picotron_ray.data.plan.sample_plan import Feed
from picotron_ray.errors import (
    CorruptError,
    PeerLostError,
    SlotUnreachableError,
    StorageError,
    StorageUnavailableError,
)
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.models.layers.init import VERSION
from picotron_ray.runtime.heartbeat import Page, read_page
from picotron_ray.runtime.phase_limits import ENOUGH, StepWork
from picotron_ray.runtime.worker import generation, generation_memory, resources, storage_wait
from picotron_ray.runtime.worker.generation import GenerationRun
from picotron_ray.runtime.worker.outcomes import loads_told
from picotron_ray.runtime.worker.resources import WorkerResources
from picotron_ray.train.step_sync import STOP
from tests.support.checkpoint.checkpoint_kit import make_state, save
from tests.support.runs.coordinator_world import job


def test_it_reads_the_manifest_that_the_log_names_and_no_other(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path / "runs"), "r1")
    log = RunLog(storage)
    log.claim_term("test")
    done = save(storage, log, tmp_path / "slots", make_state(1), (1, 2, 5))
    named = Source("commit", 5, GenerationId(1, 2), manifest=done.manifest, digest=done.digest)

    def read(source: Source) -> Any:
        run = GenerationRun.__new__(GenerationRun)
        run.spec = SimpleNamespace(source=source)  # type: ignore[assignment]
        return run._manifest(storage)

    assert read(named).step == 5
    assert read(replace(named, digest="")).step == 5, "as an older version's log names it"
    with pytest.raises(CorruptError, match="digest in the log"):
        read(replace(named, digest="0" * 64))
    for other in (replace(named, step=6), replace(named, generation=GenerationId(1, 3))):
        with pytest.raises(CorruptError, match="the log says step"):
            read(other)
    storage.delete(done.manifest)
    with pytest.raises(CorruptError, match="is missing"):
        read(named)


# --- its parts are fakes from here on ------------------------------------------------------------------

SELF, OTHER = GenerationId(2, 3), GenerationId(2, 2)
MEMBERS = (Member("w0", "n0"), Member("w1", "n1"))
SPEC = GenerationSpec(SELF, MEMBERS, Layout(dp=2), Source("init", 4), "test")


class Bench:
    """A generation whose parts note what they are told; ``told`` holds it in order."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[Any] = []
        self.page = Page(folder / "w1.page", job().elastic, lambda step, phase: self.note("phase", phase))
        self.ends: Any = "finished"
        self.policy: Any = None
        self.state: list[Any] = []
        self.loads: dict[int, tuple[int, ...]] = {}
        data = SimpleNamespace(
            feed=Feed("tokens", "plan"),  # type: ignore[arg-type]
            eval_batches=lambda *words: self.note("eval batches", *words),
            set_batches=lambda *words: [],
            stage_record=lambda: None,
        )
        self.resources = WorkerResources(
            job=job(cluster__worker_memory_bytes=None),
            worker="w1",
            node="n1",
            folder=folder,
            device=torch.device("cpu"),
            data=data,  # type: ignore[arg-type]
            page=self.page,
            storage=lambda: "storage",  # type: ignore[arg-type, return-value]
            find_service=lambda node, meanwhile: None,  # type: ignore[arg-type, return-value]
        )
        self.engine = SimpleNamespace(
            applied=(),
            adapt=lambda batches: self.policy,
            state=lambda: self.state,
            share_holders=lambda layout, wanted: (),
            expert_balance=SimpleNamespace(recent=lambda: self.loads),
            imported=lambda names: "weights" if names == {"w": 1} else names,
            initialise=partial(self.note, "initialise"),
            set_step=partial(self.note, "set step"),
            watch=lambda on_action: None,
            close=partial(self.note, "close engine"),
        )
        self.patch = monkeypatch
        self.set("ProcessGroups", self.groups)
        self.set("build_engine", lambda *words: self.engine)
        self.set("BatchLoader", self.loader)
        self.set("Loop", self.loop)
        self.patch.setattr(resources, "SlotPool", lambda *words: self.note("pool", *words) or "pool")
        self.set("Snapshotter", lambda **words: words)
        self.set("SnapshotWriter", SimpleNamespace(of=self.writer))
        self.patch.setattr(resources, "limit_memory", partial(self.note, "limit"))
        self.set("restore", partial(self.note, "restore"))
        self.set("gc", SimpleNamespace(collect=partial(self.note, "collect garbage")))
        self.set("time", SimpleNamespace(time=lambda: 77.0))

    def set(self, name: str, value: Any) -> None:
        self.patch.setattr(generation, name, value)

    def note(self, *words: Any, **named: Any) -> None:
        self.told.append((*words, *named.items()))

    def writer(self, *words: Any) -> Any:
        return SimpleNamespace(words=words, index=0, count=1)

    def groups(self, **named: Any) -> Any:
        self.grouped = named
        return SimpleNamespace(
            connect=partial(self.note, "connect"),
            check=partial(self.note, "check"),
            abort=partial(self.note, "abort"),
            close=partial(self.note, "close groups"),
            wait_for_all=lambda what, meanwhile: self.note("wait for all", what) or meanwhile(),
            lost_peer=lambda error: "peer" in str(error),
        )

    def loader(self, data: Any, **named: Any) -> Any:
        self.loaded = named
        stop = partial(self.note, "loader stops")
        return SimpleNamespace(close=partial(self.note, "close loader"), stop_waiting=stop)

    def loop(self, **named: Any) -> Any:
        self.looped = named

        def run() -> Any:
            self.note("loop", self.page.value("clean"), self.page.value("restored_at_s"))
            if isinstance(self.ends, Exception):
                raise self.ends
            return self.ends

        return SimpleNamespace(run=run)

    def make(self, spec: GenerationSpec = SPEC) -> GenerationRun:
        self.told.clear()
        return GenerationRun(self.resources, spec, ("host", 5))

    def outcome(self, run: GenerationRun) -> Any:
        self.set("Snapshotter", self.snapshotter)
        run.run()
        assert run.done.is_set()
        assert run.outcome is not None
        return run.outcome

    def snapshotter(self, **named: Any) -> Any:
        self.snapshots = named
        return SimpleNamespace(
            skipped=2,
            lock_pages=partial(self.note, "lock pages"),
            flush=lambda step, tail, pinned: self.note("flush", step, pinned),
            close=partial(self.note, "close snapshots"),
            stop_waiting=partial(self.note, "snapshots stop"),
        )


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def test_a_generation_goes_through_all_its_phases_and_leaves_nothing(bench: Bench) -> None:
    run = bench.make()
    assert run.rank == 1
    assert bench.grouped == {
        "host": "host", "port": 5, "prefix": "2.3", "rank": 1, "world_size": 2, "backend": "gloo",
        "device": torch.device("cpu"),
    }  # fmt: skip
    assert not run.done.is_set()
    bench.page.put(first_step_at_s=5.0)
    found = bench.outcome(run)
    assert found == Outcome("w1", SELF, "finished", 4, "", 0.0)
    assert bench.told == [
        ("phase", "rendezvous"),
        ("connect",),
        ("phase", "build"),
        ("phase", "restore"),
        ("initialise", bench.resources.job.seed, bench.page.moved, None),
        ("set step", 4, 0),
        ("eval batches", SPEC.layout, 1, bench.resources.job.evaluate.samples),
        (
            "pool",
            bench.resources.folder,
            "w1",
            bench.resources.job.snapshot.slots,
            slot_bytes([]),
            False,
            None,
        ),
        ("lock pages",),
        ("loop", 4, 77.0),
        ("phase", "flush"),
        ("flush", 4, False),
        ("close snapshots",),
        ("close loader",),
        ("close engine",),
        ("collect garbage",),
        ("close groups",),
        ("phase", "idle"),
    ]
    seen = read_page(bench.resources.folder / "w1.page")
    assert seen is not None
    assert (seen.term, seen.n, seen.rank, seen.step, seen.clean) == (2, 3, 1, 4, -1)
    assert (seen.built_at_s, seen.restored_at_s, seen.phase) == (77.0, 77.0, "idle")
    assert (bench.loaded["dp_index"], bench.loaded["start_step"], bench.looped["start_step"]) == (1, 4, 4)
    assert (bench.looped["rank"], bench.looped["identity"]) == (1, {"term": 2, "n": 3})
    assert bench.snapshots["writer"].words[:2] == ((2, 3), 1)
    assert bench.snapshots["writer"].words[3] == ["n0", "n1"]
    assert (run._engine, run._snapshots, run._loader) == (None, None, None)
    bench.told.clear()
    assert bench.outcome(bench.make()).kind == "finished"
    assert "pool" not in [words[0] for words in bench.told], "it is kept"


@pytest.mark.parametrize(("planned", "made"), [(1 << 30, 1 << 30), (1, slot_bytes([]))])
def test_slots_are_as_large_as_launch_planned_or_as_this_layout_needs(
    bench: Bench, planned: int, made: int
) -> None:
    bench.resources.slot_bytes = planned
    bench.outcome(bench.make())
    slots = bench.resources.job.snapshot.slots
    assert ("pool", bench.resources.folder, "w1", slots, made, False, None) in bench.told


def test_hang_limits_live_on_over_generations(bench: Bench) -> None:
    """A worker that has taken steps with these members is judged by them; one among strangers is not."""
    limits = bench.page._limits
    bench.outcome(bench.make())
    assert limits._here.work == StepWork("dp2-tp1-pp1-mb1", 16.0, 1.0)
    limits.stepped()
    for _ in range(ENOUGH):
        limits.learn("forward", 0.5)
    bench.resources.stepped = frozenset({"w0", "w1"})
    assert bench.make()._work.warm
    bench.outcome(bench.make())
    assert limits._here.p99 == {"forward": 0.5}
    bench.resources.stepped = frozenset({"w1"})
    assert not bench.make()._work.warm


@pytest.mark.parametrize(
    ("limit", "limited", "told"),
    [(None, False, []), (1 << 20, False, [("limit", 1 << 20)]), (1 << 20, True, [])],
)
def test_memory_is_limited_once_where_that_was_asked_for(
    bench: Bench, limit: int | None, limited: bool, told: list[Any]
) -> None:
    bench.resources.job = job(cluster__worker_memory_bytes=limit)
    bench.resources.limited = limited
    bench.outcome(bench.make())
    assert [words for words in bench.told if words[0] == "limit"] == told
    assert bench.resources.limited == (limited or bool(told))


def corrupt() -> CorruptError:
    return CorruptError("a.slot", "torn")


@pytest.mark.parametrize(
    ("error", "kind", "detail"),
    [
        (corrupt(), FailureKind.FAILED, "corrupt:"),
        (SlotUnreachableError("silent", "a.slot"), FailureKind.FAILED, "unreachable:a.slot"),
        (torch.OutOfMemoryError("x"), FailureKind.FAILED, "oom: x"),
        (MemoryError("x"), FailureKind.FAILED, "oom: x"),
        (RuntimeError("can't allocate memory: x"), FailureKind.FAILED, "oom: can't allocate memory: x"),
        (RuntimeError("peer " + "x" * 300), FailureKind.PEER_LOST, "peer " + "x" * 195),
        (ValueError("boom"), FailureKind.FAILED, "error: ValueError: boom"),
    ],
)
def test_errors_are_outcomes(
    bench: Bench, error: Exception, kind: Any, detail: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench.ends = error
    found = bench.outcome(bench.make())
    assert (found.kind, found.detail, found.step) == (kind, detail, 4)
    assert ("generation 2.3 failed on rank 1" in caplog.text) == (kind is FailureKind.FAILED)
    assert error.__traceback__ is None


def test_corrupt_data_is_named_by_its_slot_or_manifest(bench: Bench) -> None:
    bench.ends = corrupt()
    spec = replace(SPEC, source=Source("commit", 4, OTHER, manifest="m4"))
    run = bench.make(spec)
    assert run._judge(corrupt()) == (FailureKind.FAILED, "corrupt:m4")
    run = bench.make(replace(SPEC, source=Source("slots", 4, OTHER)))
    assert run._judge(corrupt()) == (FailureKind.FAILED, f"corrupt:{corrupt().where}")
    run._interrupted = True
    assert run._judge(corrupt())[0] is FailureKind.FAILED
    assert run._judge(RuntimeError("peer")) == ("interrupted", "")


def test_an_interrupt_strikes_at_once_or_at_the_next_step(bench: Bench) -> None:
    run = bench.make()
    run.interrupt(STOP)
    assert (bench.told, run._interrupted) == ([], False)
    assert run._requests.take() == STOP
    run.interrupt(None)
    assert (bench.told, run._interrupted) == ([("abort",)], True)
    found = bench.outcome(run)
    assert (found.kind, found.detail, found.step) == ("interrupted", "", 4)
    assert "loop" not in [words[0] for words in bench.told], "before its first step"
    assert ("flush", 4, False) not in bench.told, "there are no snapshots yet"
    assert bench.page.value("clean") == -1


def test_an_interrupt_ends_the_waits_that_no_group_knows_of(bench: Bench) -> None:
    """For a batch, and for a slot that an upload pins: else a member that waits there is killed for it."""
    run = bench.make()

    def interrupted(**named: Any) -> Any:
        loop = Bench.loop(bench, **named)
        run.interrupt(None)
        return loop

    bench.set("Loop", interrupted)
    bench.ends = RuntimeError("the loader was closed while a batch was awaited")
    assert bench.outcome(run).kind == "interrupted"
    found = [words[0] for words in bench.told]
    assert found[found.index("abort") + 1 :][:2] == ["loader stops", "snapshots stop"]


def test_a_state_that_is_not_clean_is_not_flushed(bench: Bench) -> None:
    def spoil(**named: Any) -> Any:
        loop = Bench.loop(bench, **named)
        bench.page.put(clean=-1)
        return loop

    bench.set("Loop", spoil)
    assert bench.outcome(bench.make()).step == -1
    assert [words[0] for words in bench.told if "flush" in words[0]] == []
    bench.set("Loop", lambda **named: bench.page.put(clean=0) or Bench.loop(bench, **named))
    assert bench.outcome(bench.make()).step == 0
    assert ("flush", 0, False) in bench.told


def test_lines_of_the_ledger_are_dropped_up_to_the_commit(bench: Bench) -> None:
    run = bench.make()
    run._tail.restore([f'{{"step": {step}}}' for step in (3, 4, 6)])
    for step, left in ((2, 3), (4, 1), (5, 1), (6, 0)):
        run.committed(step)
        assert len(run._tail.lines()) == left


def test_two_commits_at_once_drop_no_line_that_a_snapshot_needs() -> None:
    """The loop adds lines meanwhile, as two late messages may be handled at a time."""
    tail = LedgerTail()
    tail.restore([f'{{"step": {step}}}' for step in range(1, 501)])
    threads = [
        threading.Thread(target=lambda: [tail.committed(step) for step in range(1, 501)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for step in range(501, 1001):
        tail.add(step, str(step))
    for thread in threads:
        thread.join()
    assert tail.lines() == tuple(str(step) for step in range(501, 1001))


PARTS = ("flush", "close snapshots", "close loader", "close engine", "close groups")


@pytest.mark.parametrize("bad", PARTS)
def test_a_part_that_cannot_be_closed_keeps_no_other_open_and_no_one_waiting(bench: Bench, bad: str) -> None:
    note = bench.note

    def spoil(*words: Any, **named: Any) -> None:
        note(*words, **named)
        if words[0] == bad:
            raise OSError(28, "No space left on device")

    bench.note = spoil  # type: ignore[method-assign]
    bench.engine.close = partial(spoil, "close engine")
    run = bench.make()
    found = bench.outcome(run)
    assert run.done.is_set(), "the next generation of this worker waits for it"
    assert [words[0] for words in bench.told if words[0] in PARTS] == list(PARTS)
    assert (found.kind, found.step) == (FailureKind.FAILED, -1)
    assert found.detail.startswith("error: leaving: OSError: [Errno 28] No space left")
    assert bench.told[-1] == ("phase", "idle")
    bench.ends = RuntimeError("peer")
    assert bench.outcome(bench.make()).kind is FailureKind.PEER_LOST, "that explains more"


class FakeRestore:
    """Reads from one view; ``reads_far`` as it is told."""

    def __init__(self, view: Any, reads_far: bool, *words: Any) -> None:
        self.view, self.reads_far = view, reads_far

    def read(self, wanted: Any, work: Any) -> Any:
        source = SimpleNamespace(views=[self.view])
        work(source)
        return source


def test_each_source_is_restored_in_its_own_way(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, manifest = (
        SimpleNamespace(ledger=['{"step": 4}'], extra={UPDATES: {"skipped": 2}}),
        SimpleNamespace(extra={}, tensors=lambda: {"w": 1}),
    )
    bench.set("CommitSource", lambda storage, manifest: (storage, manifest))
    for far in (False, True):  # where all read their own node's, nobody waits for anybody
        bench.told.clear()
        bench.set("SlotRestore", partial(FakeRestore, SimpleNamespace(header=kept), far))
        run = bench.make(replace(SPEC, source=Source("slots", 4, OTHER)))
        run._restore(bench.engine)  # type: ignore[arg-type]
        waits = [("wait for all", "restored"), ("phase", "queue")] if far else []
        (_, state, source, _), *rest = bench.told
        assert (state, source.views[0].header) == ([], kept)
        assert rest == [*waits, ("phase", "restore"), ("set step", 4, 2)]
        assert run._tail.lines() == ('{"step": 4}',)
    monkeypatch.setattr(GenerationRun, "_manifest", lambda self, storage: manifest)
    seed = bench.resources.job.seed
    for only, before, what in ((True, [("initialise", seed, bench.page.moved)], "weights"), (False, [], [])):
        bench.set("weights_only", lambda manifest, only=only: only)
        run = bench.make(replace(SPEC, source=Source("commit", 6, OTHER, manifest="m6")))
        run._restore(bench.engine)  # type: ignore[arg-type]
        assert bench.told == [
            ("phase", "storage"), *before, ("restore", what, ("storage", manifest), bench.page.moved),
            ("wait for all", "restored"), ("phase", "storage"), ("phase", "restore"), ("set step", 6, 0),
        ]  # fmt: skip
    bench.resources.job = job(init_from__run="other")
    run = bench.make()
    with pytest.raises(StorageError, match="the commit of run other to start from is gone"):
        run._restore(bench.engine)  # type: ignore[arg-type]


def test_the_version_of_the_initial_weights_goes_from_slot_to_slot(bench: Bench) -> None:
    """A run that an older version began keeps what that version began it with: its slots name none."""
    run = bench.make()
    assert run._extra() == {}
    run._restore(bench.engine)  # type: ignore[arg-type]
    assert run._extra() == {INITIAL_WEIGHTS: VERSION}
    for found in ({}, {INITIAL_WEIGHTS: 1}, {INITIAL_WEIGHTS: 7, UPDATES: {"skipped": 2}}):
        run._take_over(found)
        kept = run._extra()
        assert kept.get(INITIAL_WEIGHTS) == found.get(INITIAL_WEIGHTS)
        assert kept.get(UPDATES, {}).get("skipped", 0) == run._updates.skipped


def test_a_restore_sits_out_an_outage_and_may_be_left(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = SimpleNamespace(extra={UPDATES: {"skipped": 3}})
    monkeypatch.setattr(GenerationRun, "_manifest", lambda self, storage: manifest)
    monkeypatch.setattr(storage_wait, "backoff", lambda attempt: 0.0)
    bench.set("weights_only", lambda manifest: False)
    bench.set("CommitSource", lambda storage, manifest: "source")
    ends: list[Exception | None] = [StorageUnavailableError("down"), StorageUnavailableError("down"), None]

    def restore(*words: Any) -> None:
        if (error := ends.pop(0)) is not None:
            raise error

    bench.set("restore", restore)
    run = bench.make(replace(SPEC, source=Source("commit", 6, OTHER, manifest="m6")))
    run._restore(bench.engine)  # type: ignore[arg-type]
    assert ends == []
    assert bench.told[-1] == ("set step", 6, 3)
    ends += [StorageUnavailableError("down"), StorageUnavailableError("down")]
    run.interrupt(STOP)
    with pytest.raises(PeerLostError):
        run._restore(bench.engine)  # type: ignore[arg-type]
    assert len(ends) == 2, "asked to stop before it was tried"
    assert run._judge(PeerLostError("x")) == ("interrupted", "")
    assert run._requests.take() == STOP, "for the others, should it have stayed"


def test_a_chunk_that_fails_its_digest_is_quarantined_by_who_reads_it(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = LocalStorage(str(tmp_path / "runs"), "r1")
    bench.resources.storage = lambda: storage
    monkeypatch.setattr(GenerationRun, "_manifest", lambda self, storage: SimpleNamespace(extra={}, step=6))
    bench.set("weights_only", lambda manifest: False)
    bench.set("CommitSource", lambda storage, manifest: "source")
    run = bench.make(replace(SPEC, source=Source("commit", 6, OTHER, manifest="m6")))
    for where in ("chunks/ab/abcd", "m6"):

        def restore(*words: Any, where: str = where) -> None:
            raise CorruptError("torn", where)

        bench.set("restore", restore)
        with pytest.raises(CorruptError):
            run._restore(bench.engine)  # type: ignore[arg-type]
    assert [found.key for found in storage.list("")] == ["quarantine/chunks/abcd"]


def test_whoever_reads_slots_of_another_node_lives_and_can_be_called_away(bench: Bench) -> None:
    beats: list[tuple[str, float]] = []

    class Slots:
        def __init__(self, page: Page, config: Any, find: Any, leave_if_asked: Any) -> None:
            self.leave_if_asked, self.pause = leave_if_asked, None

        def open(self, info: SlotInfo) -> str:
            self.leave_if_asked()
            beats.append((info.slot, 0.0))
            return "slot"

        def close(self) -> None:
            beats.append(("closed", 0.0))

    bench.set("RemoteSlots", Slots)
    run = bench.make(replace(SPEC, source=Source("slots", 4, OTHER, (SlotInfo("n0", "s", OTHER, 4, 0, ()),))))
    run.interrupt(None)
    with pytest.raises(PeerLostError):
        run._restore(bench.engine)  # type: ignore[arg-type]
    assert beats == [("closed", 0.0)]


def test_the_state_that_a_generation_came_from_is_protected(bench: Bench) -> None:
    assert bench.make()._protected() == (2, 3, -1)
    assert bench.make(replace(SPEC, source=Source("slots", 4, OTHER)))._protected() == (2, 2, 4)
    assert bench.make(replace(SPEC, source=Source("commit", 4, OTHER)))._protected() == (2, 3, -1)
    assert bench.make(replace(SPEC, source=Source("slots", 4)))._protected() == (2, 3, -1)


def test_seals_are_published_with_the_memory_that_is_used(bench: Bench) -> None:
    def seen() -> tuple[float, ...]:
        names = ("sealed", "pinned", "snapshot_s", "skipped", "cuda_allocated_bytes", "cuda_reserved_bytes")
        return tuple(bench.page.value(name) for name in names)

    run = bench.make()
    run._snapshots = SimpleNamespace(skipped=2)  # type: ignore[assignment]
    run._sealed(7, False, 0.5)
    assert seen() == (7, -1, 0.5, 2, -1, -1)
    cuda = SimpleNamespace(memory_allocated=lambda: 10, memory_reserved=lambda: 20)
    bench.patch.setattr(generation_memory, "torch", SimpleNamespace(cuda=cuda))
    bench.resources.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    run._sealed(8, True, 0.25)
    assert seen() == (8, 8, 0.25, 2, 10, 20)
    bench.make()
    assert bench.grouped["backend"] == "nccl"


def test_a_fault_may_strike_while_a_slot_is_written(bench: Bench) -> None:
    run = bench.make()
    before = bench.page.value("phase_count")
    run._copying("copy")
    assert bench.told == [("phase", "copy")]
    assert bench.page.value("phase_count") == before, "the loop's own phase stays"
    bench.page.on_phase = None
    run._copying("copy")
    assert len(bench.told) == 1


def test_what_runs_is_said(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.outcome(bench.make())
    bench.engine.applied = ("zero", "tensor")
    bench.policy = SimpleNamespace(sensitivity={"a": 1, "b": 2, "c": 3}, low={"b"}, error=0.00012)
    bench.outcome(bench.make())
    bench.policy.low = {"a", "b", "c"}
    bench.outcome(bench.make())
    who = "generation 2.3 rank 1:"
    adds = f"{who} {bench.resources.job.precision} adds 1.2e-04 to the loss; in full precision:"
    assert capsys.readouterr().out.splitlines() == [
        f"{who} {SPEC.layout}: one process",
        f"{who} {SPEC.layout}: zero; tensor",
        f"{adds} a, c",
        f"{who} {SPEC.layout}: zero; tensor",
        f"{adds} nothing",
    ]


def test_two_of_a_stage_tell_the_loads_of_its_experts() -> None:
    engine: Any = SimpleNamespace(expert_balance=SimpleNamespace(recent=lambda: {1: (2, 3)}))
    layout = Layout(dp=3, tp=2, pp=2)
    tellers = [rank for rank in range(12) if loads_told(engine, layout, rank)]
    assert tellers == [0, 4, 6, 10], "the first and the last replica of each stage, not all of their parts"
    assert loads_told(engine, layout, 4) == (ExpertLoads(1, (2, 3)),)
    assert loads_told(None, layout, 0) == (), "it was not built"
