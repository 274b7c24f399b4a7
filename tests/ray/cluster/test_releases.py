"""Releases of pins, from the order to the agent: told until they are heard, and what they spare."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from picotron_ray.coordinator import messages as m
from picotron_ray.errors import FencedError
from picotron_ray.runtime.coordinator import releases
from picotron_ray.runtime.coordinator.releases import Releases

A = m.GenerationId(1, 1)
FIVE, NINE = m.Release("n1", A, 5, 4), m.Release("n1", A, 9, 9, (m.StateId(A, 7),))


class Agents:
    """Agents that answer as they are told, and the releases that they are sent."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.seen: list[tuple[Any, ...]] = []
        self.going = True
        self.releases = Releases(self._call, lambda: self.going)

    async def _call(self, node: str, method: str, *arguments: Any) -> None:
        self.seen.append((node, *arguments[1:]))
        assert (method, arguments[0]) == ("release", 3)
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, asyncio.Event):
            await answer.wait()
        elif isinstance(answer, Exception):
            raise answer

    def tell(self, *commands: m.Release) -> None:
        async def told() -> None:
            await asyncio.gather(*(self.releases.tell(3, command) for command in commands))

        asyncio.run(told())
        assert self.releases._open == {}


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    monkeypatch.setattr(releases, "backoff", lambda tries: 0.0)
    return Agents()


def test_a_release_is_told_until_it_is_acknowledged(agents: Agents) -> None:
    agents.answers = [TimeoutError(), ActorUnavailableError("x", None), RayError("disk"), None]
    agents.tell(NINE)
    assert agents.seen == [("n1", (1, 1), 9, ((1, 1, 7),), 9)] * 4


def test_a_release_gives_way_to_a_newer_one_of_its_node(agents: Agents) -> None:
    """The agent was frozen; what it hears first when it is back may be the older one."""

    async def told() -> None:
        frozen = asyncio.Event()
        agents.answers = [frozen, frozen]
        both = [asyncio.create_task(agents.releases.tell(3, each)) for each in (FIVE, NINE)]
        other = asyncio.create_task(agents.releases.tell(3, m.Release("n2", A, 5, 4)))
        await other
        agents.answers = [TimeoutError(), TimeoutError(), TimeoutError()]
        frozen.set()
        await asyncio.gather(*both)

    asyncio.run(told())
    assert [words[2] for words in agents.seen if words[0] == "n1"] == [5, 9]
    agents.seen.clear()
    agents.answers = [TimeoutError(), TimeoutError()]
    agents.tell(FIVE, NINE)
    assert [words[2] for words in agents.seen] == [5, 9, 9], "five is not told again"


@pytest.mark.parametrize("ends", ["dead", "over"])
def test_a_release_is_not_told_to_the_dead_nor_after_the_end(agents: Agents, ends: str) -> None:
    if ends == "dead":
        agents.answers = [TimeoutError(), RayActorError(error_msg="gone")]
        agents.tell(FIVE)
        assert len(agents.seen) == 2
        return
    agents.going = False
    agents.tell(FIVE)
    assert agents.seen == []


def test_a_release_that_is_refused_by_a_newer_term_says_so(agents: Agents) -> None:
    error: Any = RayError("x")
    error.cause = FencedError("term 3 is older than 4")
    agents.answers = [error]
    with pytest.raises(FencedError, match="older than 4"):
        agents.tell(FIVE)
