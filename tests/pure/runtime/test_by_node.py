"""What the coordinator knows of workers by node: kept up to date, and asked without a look at all of them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from picotron_ray.runtime.coordinator.by_node import ByNode
from picotron_ray.runtime.coordinator.cluster import Cluster
from picotron_ray.runtime.coordinator.run_actors import RunActors
from picotron_ray.runtime.ray_cluster.placement import NodeView, WorkerNeeds
from tests.support.runs.coordinator_world import job

EACH = 8


def test_workers_are_known_by_node_as_they_come_and_go() -> None:
    places = ByNode()
    places.update({"w1": "a", "w2": "b", "w3": "a"})
    assert (places.on("a"), places.count("a"), places.on("c")) == (["w1", "w3"], 2, [])
    places["w1"] = "b"
    assert (places.on("a"), places.on("b"), places["w1"], len(places)) == (["w3"], ["w2", "w1"], "b", 3)
    places.setdefault("w3", "c")
    assert places.pop("w3") == "a"
    assert (places.count("a"), places.pop("w3", None), places) == (0, None, {"w2": "b", "w1": "b"})
    with pytest.raises(KeyError):
        del places["w3"]


class Looked(Cluster):
    """A cluster of full nodes, without Ray."""

    def __init__(self, nodes: int) -> None:
        RunActors.__init__(self, job())
        self._order = [f"{index:056x}" for index in range(nodes)]
        self._capacity = dict.fromkeys(self._order, EACH)
        self._needs = WorkerNeeds(1.0, 0.0)
        for number in range(nodes * EACH):
            node, worker = self._order[number // EACH], f"w1-{number}"
            self._node_of[worker] = self._placed[worker] = node
            self._workers[worker] = worker  # type: ignore[assignment]
        self.views: dict[str, Any] = {node: NodeView(node, node, EACH, 0.0, 0.0, 0.0) for node in self._order}

    def look_s(self) -> float:
        """CPU seconds of one look at all nodes, and of what a commit tells the workers of each."""
        began_s = time.thread_time()
        assert self._changed_room(self.views) == []
        assert sum(len(self.workers_on(node)) for node in self._order) == len(self._workers)
        assert sum(len(self._workers_of(node)) for node in self._order) == len(self._workers)
        return time.thread_time() - began_s


def test_workers_that_are_gone_leave_nothing_behind() -> None:
    """Names are never used again: at a loss a minute a run of weeks would know 100,000 dead ones."""
    cluster = RunActors(job())
    handle: Any = None
    cluster._node_of["stays"] = cluster._placed["stays"] = "a"
    cluster._workers["stays"] = handle
    for number in range(1000):
        worker, node = f"w1-{number}", "ab"[number % 2]
        cluster._node_of[worker] = cluster._placed[worker] = node
        cluster._workers[worker] = handle
        cluster.gone(worker)
        assert cluster.node_of(worker) == "", "not before the node's next heartbeat"
        cluster.note_workers(node, [worker, "stays"][: 1 + (node == "a")])  # a heartbeat that comes late
        assert cluster.node_of(worker) == node, "it can be killed where it lives on"
        cluster.note_workers(node, ["stays"] if node == "a" else [])
    assert (dict(cluster._node_of), list(cluster._workers), len(cluster._placed)) == (
        {"stays": "a"}, ["stays"], 1,
    )  # fmt: skip


def test_a_look_at_the_nodes_costs_in_proportion_to_the_workers() -> None:
    """Eight times the nodes cost eight times as much, or 64 times where each node looks at all workers."""
    small, large = (min(cluster.look_s() for _ in range(3)) for cluster in map(Looked, (64, 512)))
    assert large < 24 * small
