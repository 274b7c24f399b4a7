"""Pure state machine of the coordinator: ``handle(event, now)`` returns commands and touches nothing.

Use: one ``Machine`` per term. Feed it ``Begin`` first, then every event as it comes, with the time of a
monotonic clock in seconds. Carry out the commands in order. Send ``Tick`` at ``wake_at`` and at least once a
second. All decisions on membership, recovery, growth, commits and the end are taken here.

An event changes the memory (``event_handlers``). Then the consequences are derived from the whole memory
until nothing changes any more (``advance``), so policies never depend on which event it was. The time for
which the coordinator itself was stopped does not count against anybody (``_clock``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.append_queue import AppendQueue
from picotron_ray.coordinator.checkpoint_tracker import CheckpointTracker
from picotron_ray.coordinator.drains import give_back
from picotron_ray.coordinator.event_handlers import HANDLERS, sign_of_life
from picotron_ray.coordinator.final_wait import step_kept
from picotron_ray.coordinator.generation_stop import step_aborting, step_leaving
from picotron_ray.coordinator.housekeeping import (
    keep_house,
    start_workers,
    step_running,
    wanted,
    watch_launch,
)
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import (
    Command,
    Event,
    Finish,
    GenerationSpec,
    Heartbeat,
    SnapshotSealed,
    Tick,
    Uploaded,
)
from picotron_ray.coordinator.operator_orders import standing
from picotron_ray.coordinator.out_of_memory import given_up
from picotron_ray.coordinator.plan_book import Choose, Default, PlanBook, no_default
from picotron_ray.coordinator.planning import ask_planner
from picotron_ray.coordinator.policies.failure import Breaker
from picotron_ray.coordinator.recovery import collect, pick, step_collecting, step_finalising
from picotron_ray.coordinator.resting import end_workers, go_on, must_decide
from picotron_ray.coordinator.states import MachineState
from picotron_ray.coordinator.time_limit import watch_limit

LONGEST_GAP_S = 2.0  # ticks come once a second; a longer gap is the coordinator's own sleep
REPLY_FACTOR = 10.0  # x retry_deadline_s: an answer from storage that has not come by then was lost


@dataclass(frozen=True, slots=True)
class MachineView:
    """Summary of the machine, as ``status`` shows it."""

    state: MachineState
    term: int
    generation: GenerationSpec | None
    step: int  # most finished steps seen
    committed: int  # newest commit's step
    ready: int  # workers that are not in the generation
    missing: int  # workers that neither live nor start
    nodes: tuple[str, ...]
    draining: tuple[str, ...]  # those of them whose notice was heard
    failures: int
    result: Finish | None


class Machine:
    """Pure state machine of one coordinator term; see the module's docstring."""

    def __init__(
        self,
        job: JobConfig,
        choose: Choose | None = None,
        default: Default = no_default,
        flush_s: float = 0.0,
    ) -> None:
        """
        Args:
            choose: answers the planner's questions at once; None: answers come as ``Planned`` events.
            default: a layout for when they have not come yet.
            flush_s: longest that a member takes to write its part of the state when it leaves, in seconds.
        """
        reply_s = REPLY_FACTOR * job.storage.retry_deadline_s
        self.memory = MachineMemory(
            job,
            AppendQueue(reply_s),
            CheckpointTracker(reply_s),
            Breaker(job.elastic.max_failures, job.elastic.max_failures_without_progress),
            plans=PlanBook(choose, default),
            flush_s=flush_s,
        )
        self._last: float | None = None
        self.eventful = False
        """Whether the last event was more than a sign of life or of time: only then a log needs it."""

    @property
    def slept_s(self) -> float:
        """Time for which the coordinator itself was stopped, in seconds: it counts against nobody."""
        return self.memory.slept_s

    def handle(self, event: Event, now: float, slept_s: float | None = None) -> list[Command]:
        """Return the commands that follow from ``event`` at ``now`` (seconds, never going back), in order.

        Args:
            slept_s: what ``slept_s`` was after this event, where it is replayed; None: found by ``now``.
        """
        memory = self.memory
        before = self._told_by_time()
        memory.now, memory.out = self._clock(now, slept_s), []
        commands = self._handle(event)
        self.eventful = (
            not isinstance(event, Tick | Heartbeat)
            or bool(commands or memory.transitions)
            or self._told_by_time() != before
        )
        return commands

    def _told_by_time(self) -> tuple[object, ...]:
        """State that a sign of life or of time alone may change, and that a log has to have lines for."""
        memory = self.memory
        return (
            self.slept_s,
            memory.progressed,
            memory.planning,
            len(memory.begun),
            tuple(memory.unseen),
            tuple(memory.rescued),
            memory.window,
            memory.hold,
            memory.debugged,
            memory.adaptation,
            memory.adapted,
        )

    def absorb(self, heartbeats: Iterable[tuple[float, Heartbeat]]) -> None:
        """Take heartbeats of which is known that nothing followed from them, at the times given (replay).

        They do not say which members they showed: one more or less missing would have had a line of its own.
        """
        for now, heartbeat in heartbeats:
            self.memory.now = self._clock(now, self.slept_s)
            sign_of_life(self.memory, heartbeat)

    def _handle(self, event: Event) -> list[Command]:
        memory = self.memory
        memory.transitions.clear()
        memory.quiet = False
        if memory.state is MachineState.DONE:
            return []
        HANDLERS[type(event)](memory, event)
        if memory.quiet:
            return memory.out
        if memory.state not in (MachineState.NEW, MachineState.DONE):
            if isinstance(event, Tick):
                keep_house(memory)
                watch_limit(memory)
            give_back(memory)
            if memory.state is not MachineState.RUNNING or not isinstance(event, SnapshotSealed | Uploaded):
                advance(memory)  # else only the checkpoint follows: thousands of nodes say the same
        if memory.state not in (MachineState.NEW, MachineState.DONE):
            start_workers(memory)
            ask_planner(memory, event)
            memory.emit(*memory.checkpoints.plan(memory.now), *memory.appends.pump(memory.now))
        return memory.out

    def _clock(self, now: float, slept_s: float | None) -> float:
        """Return ``now`` without the time that the coordinator itself slept through."""
        memory = self.memory
        before = memory.slept_s
        if slept_s is not None:
            memory.slept_s = slept_s
        elif self._last is not None:
            memory.slept_s += max(0.0, now - self._last - LONGEST_GAP_S)
        self._last = now if self._last is None else max(now, self._last)
        now = self._last - memory.slept_s
        if memory.slept_s > before:
            memory.woke_at = now
        return now

    @property
    def wake_at(self) -> float | None:
        """Latest time for the next ``Tick``, on the clock of ``handle``; None: no need."""
        memory = self.memory
        times = [
            memory.deadline,
            memory.failing_until,
            memory.appends.wake_at,
            memory.checkpoints.wake_at,
            memory.plan_until,
        ]
        if memory.state in (MachineState.LEAVING, MachineState.ABORTING):
            times += [memory.remind_at, memory.leave_by]
        elif memory.state is MachineState.COLLECTING:
            times.append(memory.patient_until)
        due = min((time for time in times if time is not None and time > memory.now), default=None)
        return None if due is None or memory.state is MachineState.DONE else due + memory.slept_s

    @property
    def waits(self) -> dict[str, int | float | None] | None:
        """Workers that are ``ready``, ``needed`` at least and ``wanted``; ``left_s`` of the wait for them.

        None while none are waited for; without ``left_s`` there is no end to it.
        """
        memory = self.memory
        if memory.state not in (MachineState.STARTING, MachineState.WAITING):
            return None
        return {
            "ready": len(memory.roster.usable()),
            "needed": memory.job.cluster.min_workers,
            "wanted": wanted(memory),
            "left_s": None if memory.deadline is None else max(0.0, memory.deadline - memory.now),
        }

    @property
    def orders(self) -> dict[str, Any]:
        """Orders of operators that hold, as ``status`` shows them."""
        return standing(self.memory)

    @property
    def view(self) -> MachineView:
        memory = self.memory
        return MachineView(
            memory.state,
            memory.term,
            memory.spec,
            memory.seen_step,
            memory.checkpoints.committed,
            memory.roster.workers.count("idle"),
            max(0, wanted(memory) - memory.roster.count_alive()),
            tuple(memory.roster.nodes),
            tuple(node.name for node in memory.roster.nodes.values() if node.draining),
            memory.breaker.total(memory.now),
            memory.result,
        )


def advance(memory: MachineMemory) -> None:
    """Let the state follow from the memory until nothing changes any more."""
    before = None
    while before is not memory.state and memory.state in STEPS:
        before = memory.state
        STEPS[before](memory)


def _step_starting(memory: MachineMemory) -> None:
    """Wait for the term's first members: all workers, and after a while the least number of them.

    What an earlier launch had to leave uncommitted is committed before.
    """
    timed_out = memory.deadline is not None and memory.now >= memory.deadline
    if step_kept(memory, timed_out):
        return
    if memory.checkpoints.committed >= memory.job.steps and memory.rewind is None:
        collect(memory)
        return
    if memory.stop_requested and (memory.spec is None or not memory.roster.nodes):
        memory.finish("stopped", "before training started")
        return
    if memory.paused and not memory.stop_requested:
        collect(memory)
        return
    most = memory.job.cluster.max_workers
    most = min(most, memory.resumed_with or most)
    if memory.roster.workers.count("idle") < most and not timed_out and not memory.stop_requested:
        return
    ready = len(memory.roster.usable())
    enough = ready >= most or (timed_out and pick(memory) is not None)
    resumed = timed_out and memory.spec is not None  # a run that trained before waits for its workers
    if memory.stop_requested or enough or resumed:
        collect(memory)
    elif timed_out:
        least = memory.job.cluster.min_workers
        why = "no layout fits" if ready >= least else f"cluster.min_workers={least}"
        memory.finish(
            "failed", f"too few workers: {ready} ready after {memory.job.cluster.start_timeout_s:g} s, {why}"
        )


def _step_leaving(memory: MachineMemory) -> None:
    if not watch_launch(memory) and step_leaving(memory):
        collect(memory)


def _step_aborting(memory: MachineMemory) -> None:
    if step_aborting(memory):
        collect(memory)


def _step_waiting(memory: MachineMemory) -> None:
    if memory.stop_requested or pick(memory) is not None or given_up(memory):
        collect(memory)


def _step_paused(memory: MachineMemory) -> None:
    end_workers(memory)
    if must_decide(memory):
        collect(memory)
    elif not memory.paused:
        go_on(memory)


STEPS: Mapping[MachineState, Callable[[MachineMemory], None]] = {
    MachineState.STARTING: _step_starting,
    MachineState.RUNNING: step_running,
    MachineState.LEAVING: _step_leaving,
    MachineState.ABORTING: _step_aborting,
    MachineState.COLLECTING: step_collecting,
    MachineState.WAITING: _step_waiting,
    MachineState.PAUSED: _step_paused,
    MachineState.FINALISING: step_finalising,
}
