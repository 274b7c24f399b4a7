"""After a rewind status, checkpoint-now and the summary speak of the history on which the run stands."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.checkpoint.store.chunks import chunk_key
from picotron_ray.checkpoint.store.lineage import newest_commit
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.config.load import parse_job
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Source
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.driver import ended_run
from picotron_ray.runtime.run_storage import run_store
from picotron_ray.runtime.run_storage.run_store import RunStore
from tests.pure.coordinator.test_rewind import bad, committed, running
from tests.support.checkpoint.large_parts import large_part
from tests.support.runs.coordinator_world import World, snapshot


def commit(world: World, record: RunRecord, step: int) -> None:
    committed(world, step)
    record.observe(m.Appended("commit", world.spec.id, step, 100 + step, f"m{step}"), [], time.time())


def test_status_tells_the_machines_newest_commit() -> None:
    world = running()
    record = RunRecord(world.machine.memory.job)
    assert record.status(0)["committed"] is None
    record.begin(1, {}, lambda: world.machine.memory.checkpoints.committed)
    assert record.status(0)["committed"] is None
    commit(world, record, 25)
    commit(world, record, 40)
    assert record.status(0)["committed"] == 40
    world.answer(bad(world, 50), ())
    assert world.spec.resume_step == 25
    assert record.status(0)["committed"] == 25
    spec = world.spec
    world.send(m.Heartbeat("a", spec.id, {spec.members[0].worker: 30}))
    world.send(m.SnapshotSealed("a", spec.id, 30, snapshot(spec, 30)), m.Uploaded("a", spec.id, 30))
    world.log_appends()
    assert record.status(0)["committed"] == 30, "a commit that was asked for is seen, though 40 was larger"


def test_before_a_term_begins_the_last_commit_that_was_heard_of_is_told() -> None:
    world = running()
    record = RunRecord(world.machine.memory.job)
    for step in (25, 40, 30):
        record.observe(m.Appended("commit", world.spec.id, step, step, "m"), [], time.time())
    assert record.status(0)["committed"] == 30


ONE, TWO = GenerationId(1, 1), GenerationId(1, 2)


class Store:
    """Run with commits of steps 2 and 4, rewound to 2, before the next commit."""

    def __init__(self, folder: Path) -> None:
        self.job = parse_job({"name": "r", "storage": {"url": str(folder)}, "data": {"global_batch": 8}})
        self.store = RunStore(self.job, lambda step: None)
        self.store.claim()
        self.store.append_generation(GenerationSpec(ONE, (), Layout(), Source("init"), "first"))
        self.commit(1, 2, 0)
        self.commit(1, 4, 2)
        body = self.store._log.commits()[0].body
        source = Source("commit", 2, ONE, manifest=body["manifest"], digest=body["digest"])
        rewinds = (m.Rewind(2, 4, "non-finite"),)
        self.store.append_generation(GenerationSpec(TWO, (), Layout(), source, "rewound", rewinds=rewinds))

    def commit(self, n: int, step: int, known: int) -> None:
        part = large_part(3, step, known=known)
        lines = [json.dumps({"step": at, "n": n}) for at in range(known + 1, step + 1)]
        part = type(part)(**{**vars(part), "n": n, "ledger": tuple(lines)})
        for address, info in part.chunks.items():
            self.store._storage.put(chunk_key(address), bytes(info.size))
        assert self.store.commit(GenerationId(1, n), step, [part.encode()]).error == ""

    def close(self) -> None:
        self.store.close()
        for threads in (self.store.executor, self.store.committer, self.store.collector):
            threads.shutdown()


def test_the_summary_is_of_the_history_on_which_the_run_stands(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Store(memory_path)
    asked: list[tuple[list[int], int, list[range]]] = []

    def figures(job: Any, lines: Any, steps: int, expected: str, passed: list[range]) -> dict[str, Any]:
        asked.append(([line["n"] for line in lines], steps, passed))
        return {}

    monkeypatch.setattr(run_store, "ledger_figures", figures)
    try:
        run.store.finish({"status": "stopped"})
        assert [line["step"] for line in run.store.ledger_lines()] == [1, 2]
        run.commit(2, 3, 2)
        run.store.finish({"status": "stopped"})
        assert [line["n"] for line in run.store.ledger_lines(after=1)] == [1, 2]
    finally:
        run.close()
    passed = m.Rewind(2, 4, "non-finite").passed
    assert asked == [([1, 1], 2, []), ([1, 1, 2], 3, [passed])]


def test_a_launch_goes_on_from_where_the_rewind_went(memory_path: Path) -> None:
    run = Store(memory_path)
    try:
        assert ended_run._committed(run.store._storage) == 2
        log = RunLog(run.store._storage)
        assert newest_commit(log) is None, "nothing is read yet"
        log.refresh()
        found = newest_commit(log)
        assert found is not None
        assert found.body["step"] == 2
        assert log.commits()[-1].body["step"] == 4
    finally:
        run.close()
