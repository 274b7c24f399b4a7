"""``bench coordinator``: the real coordinator shell before a fake cluster of a given size.

One process holds the coordinator (machine, shell, record, event log) and threads that call it as the agents
and a driver would, once a second per node. Workers die one at a time, and a node. What is measured is the
CPU time of the coordinator's side, its memory, and how soon a loss is answered. The cost of Ray's own part of
a call is measured apart, on a real actor (``ray_calls``), and added for the number of calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ray import shutdown

from picotron_ray.bench.common.machine import machine, versions
from picotron_ray.bench.coordinator import ray_calls
from picotron_ray.bench.coordinator.fake_cluster import FakeCluster, FakeStore
from picotron_ray.bench.coordinator.load import Load
from picotron_ray.bench.coordinator.pauses import Pauses
from picotron_ray.bench.coordinator.report import loss_head, loss_line
from picotron_ray.config.load import load_job
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import PicotronError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator.actor import Coordinator
from picotron_ray.runtime.coordinator.beat_groups import MOST
from picotron_ray.runtime.ray_cluster.connect import connect
from picotron_ray.runtime.ray_cluster.local_ray import stop

START_S = 120.0  # longest wait for the first generation, and for one after a loss
CHECKPOINT_S = 30.0
CLOSE_S = 60.0  # longest wait for the event log's last lines
LOSSES = 5  # workers that die in a measurement, and after them one node


def job_of(nodes: int, workers_each: int, folder: Path) -> JobConfig:
    """Replicas of a small model on every worker; each has two samples of a step."""
    world = nodes * workers_each
    changes = [
        "name=bench-coordinator",
        "steps=1000000000",
        f"data.global_batch={2 * world}",
        "layout.tp=1",
        "layout.pp=1",
        "layout.cp=1",
        "layout.zero=0",
        "layout.micro_batch=1",
        f"cluster.max_workers={world}",
        "cluster.device=cpu",
        "elastic.grow=false",
        "elastic.max_failures=1000000",
        "elastic.node_timeout_s=30",  # the fake nodes share this process; how late they are is told
        f"checkpoint.interval_steps={int(CHECKPOINT_S)}",
        "evaluate.interval_steps=1000000",
        "metrics.enabled=true",
        "metrics.coordinator_port=0",
        f"storage.url={folder}",
    ]
    return load_job("tiny", changes)


class CoordinatorError(PicotronError):
    """The coordinator under measurement failed by itself."""

    exit_code = 1


class ReplicaPlanner:
    """A planner that answers at once: every worker is a replica of the model. Plans are not measured."""

    def __init__(self, report: Callable[[m.Event], None]) -> None:
        self._report = report

    def ask(self, questions: Sequence[m.LayoutQuestion]) -> None:
        for question in questions:
            self._report(m.Planned(question, Layout(dp=question.workers), 1.0, "replicas alone"))

    def close(self) -> None:
        """There is no process."""


class WatchedCoordinator(Coordinator):
    """The coordinator, with a clock beside every event that it handles."""

    def __init__(self, job: JobConfig, cluster: FakeCluster, event_folder: Path) -> None:
        self.slowest_s: dict[str, float] = defaultdict(float)  # by kind of event
        self.handled: dict[str, int] = defaultdict(int)
        self.commits = 0
        self.decided_s = 0.0  # the machine's answer to the event that ended the last generation
        self.chosen_s = 0.0  # the machine's answer to the event that began the newest generation
        self.launched_s = 0.0  # when the newest generation was ordered
        self.ordered_s = 0.0  # when members were last told to leave
        self._fake = cluster
        self.pauses = Pauses()
        self.failure = ""  # of the coordinator itself: it would exit, and be started again by Ray
        self.failed = threading.Event()
        settings = {"event_folder": str(event_folder), "owns_ray": True}
        self._answered_s = self.slowest_answer_s = 0.0
        super().__init__(job.model_dump(mode="json"), settings)
        self._handle = self._machine.handle
        self._machine.handle = self._timed  # type: ignore[method-assign]

    def _serve(self) -> None:
        self._supervisor.leave = self._fail
        self._executor.spawn(self.pauses.watch())
        super()._serve()

    def _fail(self, name: str, error: BaseException) -> None:
        """Note an error after which a coordinator's process exits; this one is the bench's."""
        self.failure = f"{name}: {error!r}"
        self._executor.ending = True
        self.failed.set()

    def _timed(self, event: m.Event, now: float, slept_s: float | None = None) -> list[m.Command]:
        began_s = time.thread_time()
        commands = self._handle(event, now, slept_s)
        self._answered_s = time.thread_time() - began_s
        self.slowest_answer_s = max(self.slowest_answer_s, self._answered_s)
        return commands

    def _find_cluster(self) -> FakeCluster:
        return self._fake

    def _find_planner(self) -> Any:
        return ReplicaPlanner(self._post)

    def _open_store(self) -> FakeStore:
        return FakeStore(self._job, lambda step: None)

    def _dispatch(self, event: m.Event) -> list[m.Command]:
        began_s, spec = time.monotonic(), self._machine.memory.spec
        state = self._machine.memory.state
        commands = super()._dispatch(event)
        now_s, kind = time.monotonic(), type(event).__name__
        self.handled[kind] += 1
        self.commits += isinstance(event, m.Appended) and event.kind == "commit" and bool(event.seq)
        self.slowest_s[kind] = max(self.slowest_s[kind], now_s - began_s)
        if self._machine.memory.spec is not spec:
            self.launched_s, self.chosen_s = now_s, self._answered_s
        if self._machine.memory.state is MachineState.ABORTING and state is not MachineState.ABORTING:
            self.ordered_s, self.decided_s = now_s, self._answered_s
        return commands

    @property
    def state(self) -> MachineState:
        return self._machine.memory.state

    def on_loop(self, work: Callable[[], object]) -> None:
        """Run something on the coordinator's own thread, where the fake cluster lives."""
        done = threading.Event()

        def run() -> None:
            work()
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()

    def rest(self, seconds: float) -> None:
        """Wait; PicotronError, with exit code 1, where the coordinator itself fails meanwhile."""
        if self.failed.wait(seconds):
            raise CoordinatorError(f"bench coordinator: the coordinator failed: {self.failure}")

    def end(self) -> None:
        """Stop the loop; nothing of a real run is there to be ended."""
        self._executor.ending = True
        self.pauses.end()
        if self._begun:
            self._event_log.close(CLOSE_S)
        self._store.executor.shutdown()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop)
        self._loop.call_soon_threadsafe(self._loop.stop)


def bench(
    nodes: int, workers_each: int, seconds: float, say: Callable[[str], None], *, with_calls: bool = True
) -> dict[str, Any]:
    """Run the fake cluster for ``seconds`` after its first step; returns all figures.

    Args:
        with_calls: measure real calls of Ray too, on a Ray of their own.
    """
    with tempfile.TemporaryDirectory(prefix="picotron-bench-") as name:
        folder = Path(name)
        calls = _real_calls(folder, workers_each) if with_calls else None
        job = job_of(nodes, workers_each, folder / "storage")
        cluster = FakeCluster(job, nodes, workers_each)
        coordinator = WatchedCoordinator(job, cluster, folder / "events")
        cluster.on_exit, cluster.on_uploaded = coordinator.worker_exited, coordinator.uploaded
        load = Load(coordinator, cluster, CHECKPOINT_S)
        try:
            with _errors_alone():
                load.start()
                _wait(
                    coordinator,
                    lambda: coordinator.state is MachineState.RUNNING and cluster.step() > 1,
                    "no first step",
                )
                say(f"{nodes} nodes x {workers_each} workers train; measuring for {seconds:g} s")
                found = _measured(coordinator, cluster, load, seconds, say)
        finally:
            load.end()
            coordinator.end()
    return {"machine": {**machine(), **versions()}, **found, "calls": calls}


@contextlib.contextmanager
def _errors_alone() -> Iterator[None]:
    """Keep the package's log to errors: the coordinator's events would be thousands of lines."""
    package = logging.getLogger("picotron_ray")
    level = package.level
    package.setLevel(logging.ERROR)
    try:
        yield
    finally:
        package.setLevel(level)


def _real_calls(folder: Path, workers_each: int) -> dict[str, float]:
    ray = connect(job_of(1, 2, folder), begins=False)  # it goes with this process
    try:
        return ray_calls.measure(workers_each, MOST)
    finally:
        shutdown()
        if ray is not None:
            stop(ray, grace_s=0.0)


def _measured(
    coordinator: WatchedCoordinator,
    cluster: FakeCluster,
    load: Load,
    seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    coordinator.slowest_s.clear()
    coordinator.slowest_answer_s = 0.0
    coordinator.handled.clear()
    coordinator.pauses.begin()
    losses, load.latest_s = [], 0.0
    say(loss_head())
    start, commits = _Usage(load), coordinator.commits
    memory_bytes = [_resident_bytes()]
    for number in range(LOSSES + 1):
        coordinator.rest(seconds / (LOSSES + 2))
        losses.append(_lose(coordinator, cluster, whole_node=number == LOSSES))
        memory_bytes.append(_resident_bytes())
        say(loss_line("a node" if number == LOSSES else f"worker {number + 1}", losses[-1]))
    coordinator.rest(max(0.0, start.began_s + seconds - time.monotonic()))
    memory_bytes.append(_resident_bytes())
    usage = start.until_now(load)
    return {
        "nodes": len(cluster.nodes),
        "workers": len(cluster.workers),
        **usage,
        "memory_bytes": memory_bytes,
        "late_s": load.latest_s,
        "losses": losses,
        "commits": coordinator.commits - commits,
        "handled": dict(coordinator.handled),
        "slowest_answer_s": coordinator.slowest_answer_s,
        "slowest_s": dict(coordinator.slowest_s),
        "loop_pause_s": coordinator.pauses.loop_s,
        "garbage_pause_s": coordinator.pauses.garbage_s,
        "errors": [event["text"] for event in coordinator.status()["events"] if event["level"] == "error"],
    }


def _lose(coordinator: WatchedCoordinator, cluster: FakeCluster, *, whole_node: bool) -> dict[str, float]:
    """Lose a worker, or a node; returns seconds to the order to leave and to the next generation's start."""
    spec, began_s, calls = cluster.spec, time.monotonic(), cluster.calls_made
    assert spec is not None
    victim = spec.members[len(spec.members) // 2]
    if whole_node:
        coordinator.on_loop(lambda: coordinator._dispatch(cluster.lose_node(victim.node)))
    else:
        coordinator.on_loop(lambda: cluster.kill(victim.worker))
    _wait(coordinator, lambda: cluster.spec is not spec and cluster.all_called, "no generation after a loss")
    return {
        "decided_s": coordinator.decided_s,
        "chosen_s": coordinator.chosen_s,
        "told_s": cluster.told_s - began_s,
        "ordered_s": coordinator.ordered_s - began_s,
        "launched_s": coordinator.launched_s - began_s,
        "called_s": cluster.called_s - began_s,
        "calls": cluster.calls_made - calls,
    }


class _Usage:
    """CPU time and calls since now."""

    def __init__(self, load: Load) -> None:
        self.began_s = time.monotonic()
        self._cpu_s, self._outside_s, self._calls = time.process_time(), load.outside_s, load.calls

    def until_now(self, load: Load) -> dict[str, float]:
        wall_s = time.monotonic() - self.began_s
        outside_s = load.outside_s - self._outside_s
        return {
            "wall_s": wall_s,
            "cpu_share": (time.process_time() - self._cpu_s - outside_s) / wall_s,
            "calls_per_s": (load.calls - self._calls) / wall_s,
        }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _wait(coordinator: WatchedCoordinator, what: Callable[[], bool], otherwise: str) -> None:
    end_s = time.monotonic() + START_S
    while not what():
        if time.monotonic() > end_s:
            raise PicotronError(f"bench coordinator: {otherwise} within {START_S:g} s")
        coordinator.rest(0.01)
