"""Greetings of a large run: answers name what all agents know alike, and one of them tells it."""

from __future__ import annotations

import asyncio
import json
import pickle
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import plain
from picotron_ray.coordinator.lineage import slim
from picotron_ray.errors import FencedError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator import greetings
from picotron_ray.runtime.node_agent import specs
from picotron_ray.runtime.node_agent.agent import Agent
from picotron_ray.runtime.node_agent.specs import name_of
from picotron_ray.runtime.ray_cluster import kept_slots
from tests.support.runs.coordinator_parts import Nodes, view
from tests.support.runs.coordinator_world import job

WORKERS = 4096


def large_spec(n: int = 3) -> m.GenerationSpec:
    members = tuple(m.Member(f"w1-{at}", f"{at // 8:056x}") for at in range(WORKERS))
    return m.GenerationSpec(m.GenerationId(1, n), members, Layout(dp=WORKERS), m.Source("init"), "test")


SMALL = m.GenerationSpec(m.GenerationId(1, 2), (m.Member("w", "a"),), Layout(), m.Source("init"), "test")


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    monkeypatch.setattr(Agent, "_watch", lambda self: None)
    monkeypatch.setattr(Agent, "_tell", lambda self, *words: Future())
    config = job(metrics__enabled=False, snapshot__folder=str(tmp_path))
    return Agent(config.model_dump(mode="json"), "n1", "127.0.0.1")


def test_an_agents_answer_does_not_grow_with_the_run(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, read = large_spec(), [0]
    text = json.dumps(plain(spec))
    for at in range(8):
        (agent._folder / f"w1-{at}.spec").write_text(text)
    kept_slots.mark(agent._folder, {"x.0.slot": 7}, plain(large_spec(2)))
    decode = specs.decode_spec

    def counted(data: Any) -> m.GenerationSpec:
        read[0] += 1
        return decode(data)

    monkeypatch.setattr(specs, "decode_spec", counted)
    said = agent.hello(1)
    assert len(pickle.dumps(said)) < 20_000 < len(text) / 10
    assert (said["spec"].id, said["kept_by"].id) == (spec.id, m.GenerationId(1, 2))
    for again in (agent.hello(2), agent.hello(3)):
        assert (again["spec"], again["kept_by"]) == (said["spec"], said["kept_by"])
    agent.release(3, (1, 3), 5)
    assert read[0] == 2, "each once, not for each worker, greeting and release"
    assert said["spec"] == name_of(spec), "named alike on every node"
    assert agent.spec(3, said["spec"].digest) == spec
    assert agent.spec(3, said["kept_by"].digest) == large_spec(2)
    assert agent.spec(3, "another") is None
    with pytest.raises(FencedError):
        agent.spec(2, said["spec"].digest)


def test_a_ping_fences_and_tells_the_term_alone(agent: Agent) -> None:
    assert (agent.newest_term(), agent.newest_term(4), agent.newest_term()) == (0, 4, 4)
    with pytest.raises(FencedError, match="term 3 is older than 4"):
        agent.newest_term(3)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    found = Nodes(monkeypatch)
    found.views = [view(name) for name in "abc"]
    monkeypatch.setattr(greetings.ray, "get_actor", lambda name, _: found._agent(name[-1]))
    return found


def test_one_agent_is_asked_for_the_spec_that_all_name(nodes: Nodes) -> None:
    newer = replace(SMALL, id=m.GenerationId(1, 3))
    nodes.hello = {"a": {"spec": SMALL}, "b": {"spec": newer, "kept_by": SMALL}, "c": {"spec": newer}}
    said = asyncio.run(nodes.cluster.hello(2))
    assert {node: words["spec"] for node, words in said.items()} == {"a": None, "b": newer, "c": newer}
    assert said["b"]["kept_by"] == SMALL
    assert nodes.asked_for_specs == ["b", "b"], "for each of the two"
    asyncio.run(nodes.cluster.hello(2))
    assert len(nodes.asked_for_specs) == 2, "it is known by now"


def test_another_agent_tells_the_spec_where_the_first_is_gone(nodes: Nodes) -> None:
    nodes.hello = {node: {"spec": SMALL} for node in "abc"}
    nodes.errors["spec a"] = RayActorError()
    assert asyncio.run(nodes.cluster.hello(2))["c"]["spec"] == SMALL
    assert nodes.asked_for_specs == ["a", "b"]


def test_a_term_does_not_begin_as_if_nothing_ran_where_nobody_tells_what_does(nodes: Nodes) -> None:
    nodes.hello = {node: {"spec": SMALL} for node in "abc"}
    nodes.errors["spec"] = RayActorError()
    told: list[str] = []

    def tell(level: str, kind: str, text: str) -> None:
        told.append(text)
        nodes.errors.clear()

    said = asyncio.run(nodes.cluster.hello(2, tell))
    assert {words["spec"] for words in said.values()} == {SMALL}
    assert told == ["3 of 3 agents do not answer (a, b, c): they may be training, and are waited for"]


def test_nodes_that_join_with_what_they_kept_are_asked_for_its_spec_once(nodes: Nodes) -> None:
    info = {node: m.SlotInfo(node, "s", SMALL.id, 3, 0, ()) for node in "abc"}
    nodes.hello = {node: {"kept": (info[node],), "kept_by": SMALL, "spec": SMALL} for node in "abc"}
    assert nodes.changes() == [m.NodeJoined(n, 4, kept=(info[n],), kept_by=slim(SMALL)) for n in "abc"]
    assert len(nodes.asked_for_specs) == 1


def test_a_node_that_does_not_tell_what_it_kept_joins_once_it_does(nodes: Nodes) -> None:
    nodes.views = [view("a")]
    nodes.hello = {"a": {"kept_by": SMALL}}
    nodes.errors["spec"] = TimeoutError()
    assert nodes.changes() == []
    nodes.errors.clear()
    assert nodes.changes() == [m.NodeJoined("a", 4, kept_by=slim(SMALL))]


def test_silent_agents_are_pinged_and_not_greeted(nodes: Nodes) -> None:
    nodes.changes()
    nodes.changes()
    before = len(nodes.seen)
    nodes.now += 10 * job().elastic.heartbeat_s
    nodes.errors["hello"] = RayActorError()
    assert nodes.changes() == []
    assert nodes.seen[before:] == [(1,)] * 3, "a term, and nothing of the run"
    assert nodes.asked_for_specs == []
