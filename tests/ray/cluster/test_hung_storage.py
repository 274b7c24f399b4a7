"""The coordinator's side of storage that hangs: who asks for the newest term, and the end of a run, go on.

Run store, executor of commands and the coordinator's end are the real ones; deletions, or all calls, hang.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.checkpoint.storage.local import LocalStorage
from picotron_ray.checkpoint.store.run_log import RunLog
from picotron_ray.coordinator import messages as m
from picotron_ray.runtime.coordinator import closing, command_executor
from picotron_ray.runtime.coordinator.actor import Coordinator
from picotron_ray.runtime.coordinator.command_executor import CommandExecutor
from picotron_ray.runtime.run_storage.run_store import RunStore
from tests.support.runs.coordinator_parts import Calls
from tests.support.runs.ray_runs import tiny_job

SOON_S = 20.0
Work = Callable[["Run"], Coroutine[Any, Any, Any]]


class Run:
    """A coordinator with a term, as far as its end needs it, amid a collection whose first deletion hangs."""

    def __init__(self, folder: Path, hung: threading.Event, **storage: Any) -> None:
        job = tiny_job("r", folder / "storage")
        self.job = job.model_copy(update={"storage": job.storage.model_copy(update=storage)})
        self.store = RunStore(self.job, lambda step: None)
        self.term = self.store.claim()
        for _ in range(5):
            self.store.save_record(b"{}")
        self.folder, self.hung = folder, hung
        self.notes: list[Any] = []
        self.told: list[Any] = []

    def do(self, work: Work) -> Any:
        return asyncio.run(self._do(work))

    async def _do(self, work: Work) -> Any:
        record: Any = SimpleNamespace(note=lambda *words: self.notes.append(words), memo=dict)
        cluster: Any = Calls()
        self.executor = CommandExecutor(
            asyncio.get_running_loop(), cluster, self.store, record, self.told.append, self.told.append
        )
        self.executor.term = self.term
        self.executor.spawn(self.executor._collect())
        assert await asyncio.to_thread(self.hung.wait, SOON_S)
        return await work(self)

    async def end(self) -> None:
        async def figures() -> dict[str, Any]:
            return {}

        async def heard_term(patient: bool = True) -> int:
            return 0

        async def close(term: int, keep: Any, finished: bool) -> None:
            self.told.append(("closed", term))

        ended = Coordinator.__new__(Coordinator)
        ended._job, ended._executor, ended._begun = self.job, self.executor, False
        ended._options = {"owns_ray": True, "event_folder": str(self.folder)}
        ended._store = self.store
        ended._planner = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
        ended._logs = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
        ended._cluster = SimpleNamespace(figures=figures, heard_term=heard_term, close=close)  # type: ignore[assignment]
        ended._record = SimpleNamespace(  # type: ignore[assignment]
            summary=lambda finish: {}, done=lambda finish, summary: self.told.append(finish.status)
        )
        await ended._end(m.Finish("storage", "kept failing", m.Source("slots")))


@pytest.fixture
def woken() -> threading.Event:
    """Set once deletions are to end."""
    return threading.Event()


@pytest.fixture
def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, woken: threading.Event
) -> Iterator[Callable[..., Run]]:
    hung = threading.Event()
    delete = LocalStorage.delete

    def hang(self: LocalStorage, key: str) -> None:
        hung.set()
        woken.wait(60)
        delete(self, key)

    monkeypatch.setattr(LocalStorage, "delete", hang)
    monkeypatch.setattr(closing.local_ray, "announce_end", lambda: None)
    runs: list[Run] = []

    def make(**storage: Any) -> Run:
        runs.append(Run(tmp_path, hung, **storage))
        return runs[-1]

    yield make
    woken.set()
    for run in runs:
        run.store.collector.shutdown()
        run.store.executor.shutdown()
        run.store.committer.shutdown()


def test_the_newest_term_is_known_whatever_hangs_on_the_thread_of_the_log(made: Callable[..., Run]) -> None:
    async def ask(run: Run) -> bool | None:
        return await asyncio.wait_for(run.executor.is_newest(), SOON_S)

    run = made(call_timeout_s=600.0)
    assert run.do(ask) is True
    assert run.do(ask) is True
    RunLog(run.store._storage).claim_term("newer")
    assert run.do(ask) is False


def test_a_run_ends_while_a_deletion_hangs(made: Callable[..., Run]) -> None:
    run = made(call_timeout_s=600.0)
    run.do(lambda run: asyncio.wait_for(run.end(), SOON_S))
    assert run.told == [("closed", 1), "storage"]


def test_nobody_says_where_storage_says_nothing(
    made: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_executor, "ASK_NEWEST_S", 0.3)
    run, woken = made(call_timeout_s=10.0), threading.Event()

    def silent(self: LocalStorage, prefix: str) -> Iterator[Any]:
        woken.wait(60)
        yield from ()

    async def work(run: Run) -> bool | None:
        monkeypatch.setattr(LocalStorage, "list", silent)
        found = await run.executor.is_newest()
        await run.end()
        return found

    began = time.monotonic()
    try:
        assert run.do(work) is None
    finally:
        woken.set()
    assert time.monotonic() - began < 9.0
    assert run.told == [("closed", 1), "storage"]


def test_entries_do_not_wait_for_a_collection(made: Callable[..., Run]) -> None:
    async def append(run: Run) -> int:
        work = run.executor._loop.run_in_executor(
            run.store.executor, lambda: run.store._log.append("retire", {"manifests": []})
        )
        return await asyncio.wait_for(work, SOON_S)

    assert made(call_timeout_s=600.0).do(append) == 2


def test_a_deletion_that_hangs_is_told(made: Callable[..., Run]) -> None:
    async def told(run: Run) -> None:
        async with asyncio.timeout(SOON_S):
            while not run.notes:
                await asyncio.sleep(0.01)

    run = made(call_timeout_s=1.0)
    run.do(told)
    ((level, kind, text),) = run.notes
    assert (level, kind) == ("warning", "garbage")
    assert "garbage collection is put off" in text
    assert "gave no answer at records/000001-000001.json for 1 s" in text


def test_collections_that_are_asked_for_meanwhile_are_one(
    made: Callable[..., Run], woken: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(run: Run) -> int:
        begun: list[str] = []
        collect = run.store.collect_garbage
        monkeypatch.setattr(run.store, "collect_garbage", lambda: begun.append(collect()) or "it is full")
        asked = [asyncio.ensure_future(run.executor._collect()) for _ in range(5)]
        await asyncio.sleep(0)
        woken.set()
        await asyncio.wait_for(asyncio.gather(*asked), SOON_S)
        return len(begun)

    run = made(call_timeout_s=600.0)
    assert run.do(ask) == 1
    assert [text for _, _, text in run.notes] == [
        "garbage collection is put off (it is full); it is tried again after each commit"
    ]
