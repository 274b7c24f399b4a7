"""Load of a fake cluster: heartbeats of all nodes once a second, seals, and a driver that follows the run.

The calls are made by threads of the process as Ray's are: the bytes of each call are turned into objects, and
the coordinator's own method is called. The time that making those bytes takes is the cluster's, and turning
them into objects is part of a call of Ray, which is measured apart (``ray_calls``): neither is counted here.
"""

from __future__ import annotations

import pickle
import threading
import time
from dataclasses import fields
from typing import Any

from picotron_ray.bench.coordinator.fake_cluster import FakeCluster
from picotron_ray.config.schema.service import PHASES
from picotron_ray.runtime.coordinator.actor import Coordinator
from picotron_ray.runtime.heartbeat import PageView
from picotron_ray.runtime.node_agent.beats import Figures
from picotron_ray.runtime.telemetry_window import KEY, SERIES, Window, WorkerFigures

POLL_S = 0.5  # of a driver that follows the run
SECOND_S = 1.0
TELEMETRY_S = 60.0


class Load:
    """The cluster's side of a run; ``outside_s`` is the CPU time that was not the coordinator's."""

    def __init__(self, coordinator: Coordinator, cluster: FakeCluster, checkpoint_s: float) -> None:
        """``checkpoint_s``: a checkpoint is sealed on all nodes so often."""
        self._coordinator, self._cluster, self._checkpoint_s = coordinator, cluster, checkpoint_s
        self._relay_of: dict[str, str] = {}
        self._sealed_at = time.monotonic() + checkpoint_s
        self._ended = threading.Event()
        self._told_at: dict[str, float] = {}  # by node, its workers' telemetry
        self.outside_s = 0.0
        self.calls = 0
        self.latest_s = 0.0  # how late a second's heartbeats were done at most
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._beat, self._follow)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    # --- heartbeats ----------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Spread the calls of each second evenly over it."""
        due = time.monotonic()
        while not self._ended.is_set():
            groups = self._groups()
            for at, (caller, nodes) in enumerate(groups.items()):
                self._call(caller, nodes)
                self._ended.wait(max(0.0, due + SECOND_S * (at + 1) / len(groups) - time.monotonic()))
            due += SECOND_S
            self.latest_s = max(self.latest_s, time.monotonic() - due)
            self._seal()

    def _groups(self) -> dict[str, list[str]]:
        """Nodes by the one that calls for them."""
        began_s = time.thread_time()
        found: dict[str, list[str]] = {}
        living = set(self._cluster.nodes)
        for node in self._cluster.nodes:
            caller = self._relay_of.get(node, "")
            found.setdefault(caller if caller in living else node, []).append(node)
        self.outside_s += time.thread_time() - began_s
        return found

    def _call(self, caller: str, nodes: list[str]) -> None:
        began_s = time.thread_time()
        beats = pickle.loads(pickle.dumps({node: self._pages(node) for node in nodes}, protocol=5))
        self.outside_s += time.thread_time() - began_s
        self._relay_of[caller] = self._coordinator.heartbeats(caller, beats)
        self.calls += 1

    def _pages(self, node: str) -> Figures:
        cluster, now = self._cluster, time.monotonic()
        found = []
        tells = now - self._told_at.get(node, 0.0) >= TELEMETRY_S
        if tells:
            self._told_at[node] = now
        for name in cluster.workers_on(node):
            held = cluster.workers.get(name)
            if held is not None:
                entry = page(name, held.spec, held.rank, cluster.step(), now)
                found.append(
                    {**entry, KEY: telemetry(held.spec, held.rank)} if tells and held.spec else entry
                )
        return found

    def _seal(self) -> None:
        if time.monotonic() < self._sealed_at or self._cluster.spec is None:
            return
        self._sealed_at += self._checkpoint_s
        step, spec = self._cluster.step(), self._cluster.spec
        for node in list(self._cluster.nodes):
            began_s = time.thread_time()
            data = pickle.dumps(self._cluster.sealed_slots(node, step), protocol=5)
            self.outside_s += time.thread_time() - began_s
            self._coordinator.sealed(node, (spec.id.term, spec.id.n), step, pickle.loads(data))

    # --- a driver ------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        since = 0
        while not self._ended.wait(POLL_S):
            found = self._coordinator.status(since, "driver")
            since = max((event["seq"] for event in found["events"]), default=since)
            pickle.dumps(found, protocol=5)


def _template() -> dict[str, Any]:
    values: dict[str, Any] = {field.name: 0 for field in fields(PageView)}
    values |= {"phase": "forward", "eval_step": -1, "eval_loss": 0.0, "skipped_step": -1, "step_time_s": 1.0}
    return PageView(**{**values, "step_counts": (), "spent_s": (0.0,) * len(PHASES)}).figures()


TEMPLATE = _template()


def telemetry(spec: Any, rank: int) -> WorkerFigures:
    """Figures of a worker's steps."""
    window, stages = Window(1.0, 1.1, 0.9, 0.01), spec.layout.rank_stages(spec.layout.coordinates(rank).pp)
    series = (window,) * len(SERIES)
    known: Any = {"stage_s": dict.fromkeys(stages, 0.1), "sent_bytes": (1e9, 1e9, 1e8, 0.0, 0.0)}
    return WorkerFigures(spec.id.term, spec.id.n, rank, 100, 200, series, 0.1, 8, **known)


def page(worker: str, spec: Any, rank: int, step: int, now_s: float) -> dict[str, Any]:
    term, n = (0, 0) if spec is None else (spec.id.term, spec.id.n)
    first_s = 0.0 if spec is None else now_s
    known = {"worker": worker, "term": term, "n": n, "rank": rank, "step": step, "first_step_at_s": first_s}
    return {**TEMPLATE, "phase_since_s": now_s, **known}
