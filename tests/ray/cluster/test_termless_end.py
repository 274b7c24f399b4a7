"""End of a run by a coordinator that never got a term: agents are asked for theirs, and obey that."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from picotron_ray.coordinator import messages as m
from picotron_ray.errors import FencedError
from picotron_ray.runtime.coordinator.closing import close_nodes
from picotron_ray.runtime.ray_cluster.ray_calls import refusal
from tests.support.runs.coordinator_parts import Nodes, view

KEEPING = m.Finish("storage", "down", m.Source("slots"))


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    found = Nodes(monkeypatch)
    found.views = [view("a"), view("b")]
    monkeypatch.setattr(found.cluster, "_find_agents", lambda ids: {n: found._agent(n) for n in ids})
    return found


def end(nodes: Nodes, terms: dict[str, Any]) -> tuple[m.Finish, list[Any]]:
    """End without a term, where agents say these; returns the end and what ``close`` was called with."""
    closed: list[Any] = []

    async def close(term: int, *words: Any) -> dict[str, str]:
        closed.append((term, *words, sorted(nodes.cluster._agents)))
        if term < max(said for said in terms.values() if isinstance(said, int)):
            raise FencedError("older")
        return {}

    async def ask(agents: Any, method: str, *words: Any, **_: Any) -> dict[str, Any]:
        return {node: terms[node] if method == "newest_term" else [] for node in agents}

    nodes.cluster.close, nodes.cluster._ask_all = close, ask  # type: ignore[method-assign]
    record: Any = SimpleNamespace(figures=lambda *_: None)
    return asyncio.run(close_nodes(nodes.cluster, record, "night", 0, KEEPING)), closed


def test_an_end_without_a_term_is_ordered_in_the_newest_that_agents_know(nodes: Nodes) -> None:
    finish, closed = end(nodes, {"a": 6, "b": 7})
    assert finish == KEEPING
    assert closed == [(7, KEEPING.keep, False, ["a", "b"])]


def test_silence_of_an_agent_keeps_no_other_from_being_closed(nodes: Nodes) -> None:
    finish, closed = end(nodes, {"a": RayActorError(), "b": 7})
    assert (finish, closed[0][0]) == (KEEPING, 7)


def test_a_refusal_is_told_in_its_own_words() -> None:
    cause = FencedError("refused: term 1 is older than 2")
    raised = RayTaskError("close", "Traceback ...", cause).as_instanceof_cause()
    assert isinstance(raised, FencedError)
    assert str(refusal(raised)) == str(cause)
    assert refusal(cause) is cause
    assert refusal(ValueError("x")) is None
