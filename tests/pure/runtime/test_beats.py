"""Heartbeats of many nodes in one call: groups form, and no relay can make another node silent."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from picotron_ray.runtime.coordinator.beat_groups import FEWEST, MOST, BeatGroups
from picotron_ray.runtime.node_agent.beats import Beats, with_telemetry


class Net:
    """A coordinator and agents that answer at once, unless they are frozen or away."""

    def __init__(self, nodes: int) -> None:
        self.groups = BeatGroups(1.0)
        self.now = 0.0
        self.heard: dict[str, float] = {}
        self.calls = 0
        self.frozen: set[str] = set()
        self.cut: set[str] = set()  # their calls to the coordinator are not answered
        self.agents = {name: self._agent(name) for name in (f"n{i:04d}" for i in range(nodes))}

    def _agent(self, name: str) -> Beats:
        return Beats(name, 1.0, self._to_coordinator, self._to_agent)

    def _to_coordinator(self, method: str, caller: str, beats: dict[str, Any]) -> Future[Any]:
        assert method == "heartbeats"
        answer: Future[Any] = Future()
        if caller not in self.cut:
            self.calls += 1
            self.heard.update(dict.fromkeys(beats, self.now))
            answer.set_result(self.groups.called(caller, len(beats) - 1, self.now))
        return answer

    def _to_agent(self, node: str, method: str, sender: str, figures: Any) -> Future[Any]:
        assert method == "carry"
        answer: Future[Any] = Future()
        if node not in self.agents:
            answer.set_exception(ConnectionError(node))
        elif node not in self.frozen:
            answer.set_result(self.agents[node].carry(sender, figures))
        return answer

    def second(self) -> int:
        """One heartbeat of every living agent; returns the number of calls that the coordinator took."""
        before, self.now = self.calls, self.now + 1.0
        for name, agent in self.agents.items():
            if name not in self.frozen:
                agent.send([], self.now)
        return self.calls - before

    def longest_silence(self, *but: str) -> float:
        return self.now - min(self.heard[name] for name in self.agents if name not in but)


def relay(net: Net) -> str:
    """A node that brings the heartbeats of most others of its group."""
    return max(net.groups._relays, key=lambda name: len(net.groups._relays[name].members))


def test_few_nodes_call_by_themselves() -> None:
    net = Net(FEWEST)
    assert [net.second() for _ in range(3)] == [FEWEST] * 3


def test_many_nodes_take_few_calls() -> None:
    net = Net(2048)
    net.second()
    calls = [net.second() for _ in range(6)][-1]
    assert calls <= FEWEST + 2048 / MOST + 2
    assert net.longest_silence() <= 1.0


def test_a_frozen_dead_or_cut_relay_silences_nobody_else_for_long() -> None:
    for how in ("frozen", "dead", "cut"):
        net = Net(300)
        for _ in range(5):
            net.second()
        lost = relay(net)
        assert len(net.groups._relays[lost].members) > 30
        if how == "dead":
            del net.agents[lost]
            net.groups.forget(lost)
        else:
            getattr(net, how).add(lost)
        worst = 0.0
        for _ in range(8):
            net.second()
            worst = max(worst, net.longest_silence(lost))
        assert worst <= 4.0, how
        assert net.longest_silence(lost) <= 1.0, how
        assert net.second() < 150, "the group travels together again"


def test_a_relay_that_comes_back_is_used_again() -> None:
    net = Net(200)
    for _ in range(5):
        net.second()
    lost = relay(net)
    net.frozen.add(lost)
    for _ in range(6):
        net.second()
    net.frozen.clear()
    for _ in range(6):
        net.second()
    assert net.longest_silence() <= 1.0
    assert len(net.groups._relay_of) + len(net.groups._relays) + len(net.groups._alone) == 200


def test_a_node_that_went_is_forgotten() -> None:
    net = Net(200)
    for _ in range(4):
        net.second()
    for name in list(net.agents):
        net.groups.forget(name)
    groups = net.groups
    assert (groups._relay_of, groups._relays, groups._alone) == ({}, {}, set())


def test_telemetry_outlives_the_heartbeat_that_brought_it_to_a_relay() -> None:
    old = [{"worker": "a", "step": 1, "telemetry": 5}, {"worker": "b"}, {"worker": "c", "telemetry": 6}]
    new = [{"worker": "a", "step": 2}, {"worker": "b"}]
    assert with_telemetry(new, old) == [{"worker": "a", "step": 2, "telemetry": 5}, {"worker": "b"}]
    newer = [{"worker": "a", "step": 3, "telemetry": 7}]
    assert with_telemetry(newer, old) == newer
    relay = Beats("n1", 1.0, lambda *call: Future(), lambda *call: Future())
    relay._answered_s = relay._now_s = 10.0
    assert relay.carry("n2", old)
    assert relay.carry("n2", new)
    assert relay._carried["n2"][0] == {"worker": "a", "step": 2, "telemetry": 5}
