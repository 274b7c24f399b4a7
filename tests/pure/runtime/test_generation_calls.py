"""Calls that run a generation: of few members each, of many one a node, and what an agent's end costs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from picotron_ray.coordinator import messages as m
from picotron_ray.errors import FencedError
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator import generation_calls
from picotron_ray.runtime.coordinator.call_turns import CallTurns
from picotron_ray.runtime.coordinator.generation_calls import GenerationCalls
from picotron_ray.runtime.coordinator.run_actors import FEW
from picotron_ray.runtime.node_agent import member_calls
from picotron_ray.runtime.node_agent.member_calls import MemberCalls
from picotron_ray.runtime.worker import member_call

NODES = 2
GENERATION = m.GenerationId(3, 1)
STORE = ("host", 1)


def spec_of(workers: int) -> m.GenerationSpec:
    members = tuple(m.Member(f"w{at}", f"n{at % NODES}") for at in range(workers))
    return m.GenerationSpec(GENERATION, members, Layout(dp=workers), m.Source("init"), "test")


LARGE = spec_of(FEW + 2)


def left(worker: str) -> m.Outcome:
    return m.Outcome(worker, GENERATION, FailureKind.PEER_LOST, 5)


class Called:
    """A cluster whose agents and workers answer when the test says so."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []  # who was called, and what it was told of members
        self.answers: dict[str, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)
        self.silent: set[str] = set()

    async def _answer(self, whom: str) -> Any:
        found = await self.answers[whom].get()
        if isinstance(found, Exception):
            raise found
        return found

    async def call_agent(self, node: str, method: str, *arguments: Any, **limits: Any) -> Any:
        assert (method, limits) == ("run_generation", {"timeout_s": None, "patience_s": 0.0})
        self.calls.append((node, arguments[-1]))
        return await self._answer(node)

    async def call_worker(self, worker: str, method: str, *arguments: Any, timeout_s: Any) -> Any:
        assert (method, timeout_s) == ("run_generation", None)
        self.calls.append((worker, arguments))
        return await self._answer(worker)

    def shared(self, spec: m.GenerationSpec) -> Any:
        return spec

    def is_silent(self, node: str) -> bool:
        return node in self.silent


class Shell:
    """A coordinator's loop with the calls of one generation."""

    def __init__(self, spec: m.GenerationSpec, store: tuple[str, int] | None = STORE) -> None:
        self.cluster: Any = Called()
        self.events: list[m.Event] = []
        self.errors: list[BaseException] = []
        self.ending = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.members = GenerationCalls(self.cluster, self.events.append, self.spawn, lambda: not self.ending)
        self.spawn(self.members.run(3, spec, store, "n0"))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if (error := task.exception()) is not None:
            self.errors.append(error)

    async def answer(self, whom: str, answer: Any) -> None:
        self.cluster.answers[whom].put_nowait(answer)
        await self.turn()

    async def turn(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    @property
    def whom(self) -> list[str]:
        return [call[0] for call in self.cluster.calls]


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_calls, "WATCH_S", 0.01)
    monkeypatch.setattr(member_call, "UNAVAILABLE_RETRY_S", 0.0)


def on(node: str, but: tuple[str, ...] = ()) -> list[str]:
    return [each.worker for each in LARGE.members if each.node == node and each.worker not in but]


def test_few_members_are_each_called() -> None:
    async def work() -> None:
        shell = Shell(spec_of(3))
        await shell.turn()
        assert shell.cluster.calls == [(f"w{at}", (3, spec_of(3), STORE)) for at in (0, 2, 1)]
        await shell.answer("w1", ActorUnavailableError("x", None))
        await asyncio.sleep(0.01)
        assert shell.whom == ["w0", "w2", "w1", "w1"], "a lost reply is asked for again"
        await shell.answer("w1", None)
        assert shell.whom[4:] == ["w1"], "so is what says to ask again"
        for worker in ("w0", "w1", "w2"):
            await shell.answer(worker, left(worker))
        assert shell.events == [left(f"w{at}") for at in range(3)]
        assert not shell.tasks

    asyncio.run(work())


def test_a_large_generation_takes_one_call_for_each_node_and_one_for_its_ends() -> None:
    async def work() -> None:
        shell = Shell(LARGE)
        await shell.turn()
        assert shell.cluster.calls == [(node, on(node)) for node in ("n0", "n1")]
        died = m.WorkerExited("w0", "process died")
        await shell.answer("n0", [died])
        assert shell.events == [died], "told at once, while the others go on"
        assert shell.cluster.calls[2:] == [("n0", on("n0", ("w0",)))]
        for node in ("n0", "n1"):
            await shell.answer(node, [left(worker) for worker in on(node, ("w0",))])
        assert shell.events[1:] == [left(worker) for node in ("n0", "n1") for worker in on(node, ("w0",))]
        assert len(shell.cluster.calls) == 3
        await asyncio.sleep(0.02)
        assert not shell.tasks

    asyncio.run(work())


@pytest.mark.parametrize(
    "error", [RayActorError(error_msg="x"), ActorUnavailableError("x", None), RayError("x"), TimeoutError()]
)
def test_the_members_of_a_node_whose_agent_fails_are_called_and_no_end_is_lost(error: Exception) -> None:
    async def work() -> None:
        shell = Shell(LARGE)
        await shell.turn()
        await shell.answer("n0", [left("w0")])
        await shell.answer("n0", error)
        assert shell.whom == ["n0", "n1", "n0", *on("n0", ("w0",))], "whose end is known is not called"
        assert shell.cluster.calls[-1][1] == (3, LARGE, STORE)
        await shell.answer("w2", RayActorError(error_msg="x"))
        assert shell.events == [left("w0"), m.WorkerExited("w2", "process died")]

    asyncio.run(work())


def test_the_members_of_a_node_whose_agent_is_frozen_are_called() -> None:
    """It answers later all the same: each end is told once."""

    async def work() -> None:
        shell = Shell(LARGE)
        await shell.turn()
        shell.cluster.silent.add("n1")
        await asyncio.sleep(0.03)
        assert shell.whom == ["n0", "n1", *on("n1")]
        await shell.answer("w1", left("w1"))
        await shell.answer("n1", [left("w1"), left("w3")])
        await shell.answer("w3", left("w3"))
        assert shell.events == [left("w1"), left("w3")]
        assert shell.cluster.calls[-1] == ("n1", on("n1", ("w1", "w3"))), (
            "the agent answers: it is asked again"
        )

    asyncio.run(work())


def test_a_node_whose_agent_answers_again_is_called_by_it_again() -> None:
    """A blip of the coordinator's network would leave it with 16,384 calls of workers until the next one."""

    async def work() -> None:
        shell = Shell(LARGE)
        await shell.turn()
        for blip in range(3):
            shell.cluster.silent.update({"n0", "n1"})
            await asyncio.sleep(0.03)
            expected = 2 + len(LARGE.members) + blip
            assert len(shell.whom) == expected, "calls that are open already are not made again"
            shell.cluster.silent.clear()
            await asyncio.sleep(0.03)
            assert len(shell.whom) == expected, "the agent's answer is still to come"
            await shell.answer("n0", [left(on("n0")[blip])])
            assert shell.cluster.calls[-1] == ("n0", on("n0")[blip + 1 :])
        await shell.answer("w1", ActorUnavailableError("x", None))
        await asyncio.sleep(0.01)
        assert shell.whom[-1] == "n0", "what was called directly is not called so again"
        await shell.answer("w3", left("w3"))
        await shell.answer("n1", [left("w3"), left("w1")])
        assert shell.events[3:] == [left("w3"), left("w1")], "each end is told once, whoever was faster"

    asyncio.run(work())


def test_an_agent_that_failed_is_asked_again_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_calls, "AGAIN_S", 0.05)

    async def work() -> None:
        shell = Shell(LARGE)
        for part_of in (0.05, 0.1):
            await shell.turn()
            await shell.answer("n0", RayActorError(error_msg="x"))
            before = shell.whom.count("n0")
            await asyncio.sleep(0.6 * part_of)
            assert shell.whom.count("n0") == before
            await asyncio.sleep(part_of)
            assert shell.whom.count("n0") == before + 1
        assert len(shell.whom) == 4 + len(on("n0")), "its members were called once"
        await shell.answer("n0", [left(worker) for worker in on("n0")])
        await shell.answer("n1", [left(worker) for worker in on("n1")])
        await asyncio.sleep(0.02)
        assert len(shell.events) == len(LARGE.members)

    asyncio.run(work())


def test_direct_calls_of_thousands_are_made_in_turns_and_no_more_of_them_once_agents_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation_calls, "DIRECT_CALLS", 20)
    monkeypatch.setattr(generation_calls, "WATCH_S", 0.05)

    async def work() -> None:
        shell = Shell(LARGE)
        shell.cluster.silent.update({"n0", "n1"})
        await shell.turn()
        await asyncio.sleep(0.07)
        assert len(shell.whom) == 2 + 20
        shell.cluster.silent.clear()
        await asyncio.sleep(0.2)
        assert len(shell.whom) <= 2 + 2 * 20

    asyncio.run(work())


def test_few_members_wait_for_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_calls, "DIRECT_CALLS", 1)

    async def work() -> None:
        shell = Shell(spec_of(FEW))
        await shell.turn()
        assert len(shell.whom) == FEW

    asyncio.run(work())


def test_a_coordinator_that_stood_still_itself_takes_no_agent_for_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        shell = Shell(LARGE)
        await shell.turn()
        shell.cluster.silent.update({"n0", "n1"})
        monkeypatch.setattr(generation_calls, "SLEPT_S", -1.0)
        await asyncio.sleep(0.03)
        assert shell.whom == ["n0", "n1"]
        monkeypatch.setattr(generation_calls, "SLEPT_S", 2.0)
        await asyncio.sleep(0.03)
        assert len(shell.whom) == 2 + len(LARGE.members)

    asyncio.run(work())


def test_an_agent_that_knows_a_newer_term_ends_the_calls() -> None:
    async def work() -> None:
        shell = Shell(LARGE)
        await shell.turn()
        await shell.answer("n0", FencedError("term 3 is older than 4"))
        assert [type(error) for error in shell.errors] == [FencedError]
        assert shell.whom == ["n0", "n1"]

    asyncio.run(work())


def test_without_a_store_the_node_that_was_asked_for_one_is_left_out() -> None:
    async def work() -> None:
        shell = Shell(LARGE, store=None)
        await shell.turn()
        assert shell.cluster.calls == [("n1", on("n1"))]

    asyncio.run(work())


def test_no_call_is_made_for_a_run_that_ends() -> None:
    async def work() -> None:
        shell = Shell(LARGE)
        await shell.turn()
        shell.ending = True
        await shell.answer("n0", [left("w0")])
        await shell.answer("n1", [])
        await asyncio.sleep(0.02)
        assert shell.whom == ["n0", "n1"]
        assert not shell.tasks

    asyncio.run(work())


# --- the agent's side --------------------------------------------------------------------------------


class Workers:
    """Workers' handles, whose answers come when the test says so; from any thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.open: dict[str, list[asyncio.Future[Any]]] = defaultdict(list)
        self.members = MemberCalls(self.find)
        monkeypatch.setattr(member_calls, "answer", self._answer)

    def find(self, worker: str) -> Any:
        if worker == "ended":
            raise ValueError(worker)

        def remote(*arguments: Any) -> str:
            self.calls.append((worker, *arguments))
            return worker

        return SimpleNamespace(run_generation=SimpleNamespace(remote=remote))

    async def _answer(self, worker: str) -> Any:
        future = asyncio.get_running_loop().create_future()
        self.open[worker].append(future)
        return await future

    def run(self, term: int, *workers: str, n: int = 1) -> Coroutine[Any, Any, list[Any]]:
        order = (term, m.GenerationId(3, n))
        return asyncio.to_thread(self.members.run, order, "spec", STORE, workers)

    async def end(self, worker: str, answer: Any) -> None:
        """The newest call of a worker is answered."""

        while not self.open[worker]:
            await asyncio.sleep(0.001)
        future = self.open[worker].pop()

        def answered() -> None:
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        self.members._loop.call_soon_threadsafe(answered)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    made = Workers(monkeypatch)
    yield made
    made.members.close()


def test_an_agent_answers_with_the_first_ends_and_calls_nobody_twice(workers: Workers) -> None:
    async def work() -> None:
        first = asyncio.create_task(workers.run(3, "w1", "w2", "w3"))
        await workers.end("w2", left("w2"))
        await workers.end("w1", RayActorError(error_msg="x"))
        ends = await first
        assert sorted(ends, key=str) == sorted([left("w2"), m.WorkerExited("w1", "process died")], key=str)
        second = asyncio.create_task(workers.run(3, "w3"))
        await workers.end("w3", left("w3"))
        assert await second == [left("w3")]
        assert workers.calls == [(name, 3, "spec", STORE) for name in ("w1", "w2", "w3")]
        assert await workers.run(3, "w1", "w2") == ends or len(ends) == 2, "what has ended is told again"

    asyncio.run(work())


def test_an_agent_asks_a_worker_again_whose_answer_was_lost(workers: Workers) -> None:
    async def work() -> None:
        asked = asyncio.create_task(workers.run(3, "w1"))
        await workers.end("w1", ActorUnavailableError("x", None))
        await workers.end("w1", left("w1"))
        assert await asked == [left("w1")]
        assert len(workers.calls) == 2

    asyncio.run(work())


def test_a_newer_term_calls_the_workers_anew_so_that_they_know_it(workers: Workers) -> None:
    async def work() -> None:
        old = asyncio.create_task(workers.run(3, "w1"))
        await asyncio.sleep(0.05)
        new = asyncio.create_task(workers.run(4, "w1"))
        assert await old == [], "its coordinator was replaced"
        while len(workers.open["w1"]) < 2:
            await asyncio.sleep(0.001)
        await workers.end("w1", left("w1"))
        assert await new == [left("w1")]
        assert [call[1] for call in workers.calls] == [3, 4]
        assert await workers.run(3, "w1") == [], "an order that comes late"

    asyncio.run(work())


def test_a_worker_that_knows_a_newer_term_fences_the_agents_caller_off(workers: Workers) -> None:
    async def work() -> None:
        asked = asyncio.create_task(workers.run(3, "w1", "w2"))
        await workers.end("w1", FencedError("x"))
        with pytest.raises(FencedError):
            await asked

    asyncio.run(work())


def test_a_worker_that_the_agent_does_not_find_is_left_to_the_coordinator(workers: Workers) -> None:
    with pytest.raises(ValueError, match="ended"):
        asyncio.run(workers.run(3, "w1", "ended"))
    assert workers.calls == []


# --- turns -------------------------------------------------------------------------------------------


def test_a_loop_serves_others_between_the_calls_of_a_burst() -> None:
    made: list[int] = []

    async def work() -> None:
        turns, served = CallTurns(16), 0

        async def call() -> None:
            await turns.take()
            made.append(served)

        burst = [asyncio.create_task(call()) for _ in range(1000)]
        while not all(task.done() for task in burst):
            served += 1
            await asyncio.sleep(0)

    asyncio.run(work())
    assert len(made) == 1000
    assert max(made.count(turn) for turn in set(made)) <= 32


def test_who_gives_up_waiting_for_a_turn_keeps_nobody_from_it() -> None:
    async def work() -> int:
        turns = CallTurns(1)
        burst = [asyncio.create_task(turns.take()) for _ in range(10)]
        await asyncio.sleep(0)
        for task in burst[1:5]:
            task.cancel()
        found = await asyncio.gather(*burst, return_exceptions=True)
        return sum(one is None for one in found)

    assert asyncio.run(work()) == 6
