"""The coordinator's brain: ``handle(event, now)`` returns the commands that follow, and touches nothing.

Use: one ``Machine`` per term. Feed it ``Begin`` first, then every event as it comes, with the time of a
monotonic clock in seconds; carry out the commands in order; send ``Tick`` at ``wake_at`` and at least
once a second. All decisions on membership, recovery, growth, commits and the end are taken here.

An event changes the memory (``events``), then the consequences are derived from the whole memory until
nothing changes any more (``advance``): policies never depend on which event it was. Where the coordinator
itself was stopped for a while, that time does not count against anybody (``_clock``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.append_queue import AppendQueue
from picotron_ray.coordinator.checkpoint_tracker import Checkpoints
from picotron_ray.coordinator.events import HANDLERS
from picotron_ray.coordinator.generation_stop import step_aborting, step_leaving
from picotron_ray.coordinator.housekeeping import start_workers, step_running, upkeep, wanted
from picotron_ray.coordinator.machine_memory import Choose, Context
from picotron_ray.coordinator.messages import Command, Event, Finish, GenerationSpec
from picotron_ray.coordinator.policies.failure import Breaker
from picotron_ray.coordinator.recovery import collect, pick, step_collecting, step_finalising
from picotron_ray.coordinator.states import State

LONGEST_GAP_S = 2.0  # ticks come once a second; a longer gap is the coordinator's own sleep
REPLY_FACTOR = 10.0  # x retry_deadline_s: an answer from storage that has not come by then was lost


@dataclass(frozen=True, slots=True)
class MachineView:
    """What `status` shows of the machine."""

    state: State
    term: int
    generation: GenerationSpec | None
    step: int  # most finished steps seen
    committed: int  # newest commit's step
    ready: int  # workers that are not in the generation
    missing: int  # workers that neither live nor start
    nodes: tuple[str, ...]
    failures: int
    result: Finish | None


class Machine:
    """Pure state machine of one coordinator term; see the module's docstring."""

    def __init__(self, job: JobConfig, choose: Choose) -> None:
        reply_s = REPLY_FACTOR * job.storage.retry_deadline_s
        self.ctx = Context(
            job,
            choose,
            AppendQueue(reply_s),
            Checkpoints(reply_s),
            Breaker(job.elastic.max_failures, job.elastic.max_failures_without_progress),
        )
        self._last: float | None = None
        self._slept_s = 0.0

    def handle(self, event: Event, now: float) -> list[Command]:
        """The commands that follow from ``event`` at ``now`` (seconds, never going back), in order."""
        ctx = self.ctx
        ctx.now, ctx.out = self._clock(now), []
        ctx.transitions.clear()
        ctx.quiet = False
        if ctx.state is State.DONE:
            return []
        HANDLERS[type(event)](ctx, event)
        if ctx.quiet:
            return ctx.out
        if ctx.state not in (State.NEW, State.DONE):
            upkeep(ctx)
            advance(ctx)
        if ctx.state not in (State.NEW, State.DONE):
            start_workers(ctx)
            ctx.emit(*ctx.saves.plan(ctx.now), *ctx.appends.pump(ctx.now))
        return ctx.out

    def _clock(self, now: float) -> float:
        """``now`` without the time that the coordinator itself slept through."""
        if self._last is not None and now - self._last > LONGEST_GAP_S:
            self._slept_s += now - self._last - LONGEST_GAP_S
        self._last = now if self._last is None else max(now, self._last)
        return self._last - self._slept_s

    @property
    def wake_at(self) -> float | None:
        """When a ``Tick`` should come at the latest, on the clock of ``handle``; None: no need."""
        ctx = self.ctx
        times = [ctx.deadline, ctx.appends.wake_at, ctx.saves.wake_at if ctx.saves.job else None]
        if ctx.state in (State.LEAVING, State.ABORTING):
            times.append(ctx.remind_at)
        elif ctx.state is State.COLLECTING:
            times.append(ctx.patient_until)
        due = min((time for time in times if time is not None and time > ctx.now), default=None)
        return None if due is None or ctx.state is State.DONE else due + self._slept_s

    @property
    def view(self) -> MachineView:
        ctx = self.ctx
        return MachineView(
            ctx.state,
            ctx.term,
            ctx.spec,
            ctx.seen_step,
            ctx.saves.committed,
            len(ctx.roster.in_state("idle")),
            max(0, wanted(ctx) - len(ctx.roster.alive())),
            tuple(ctx.roster.nodes),
            ctx.breaker.total,
            ctx.result,
        )


def advance(ctx: Context) -> None:
    """Let the state follow from the memory until nothing changes any more."""
    before = None
    while before is not ctx.state and ctx.state in STEPS:
        before = ctx.state
        STEPS[before](ctx)


def _step_starting(ctx: Context) -> None:
    """The first generation of a term waits for all workers, later for the least number of them."""
    if ctx.stop_requested and (ctx.spec is None or not ctx.roster.nodes):
        ctx.finish("stopped", "before training started")
        return
    ready, timed_out = len(ctx.roster.usable()), ctx.deadline is not None and ctx.now >= ctx.deadline
    enough = ready >= ctx.job.cluster.max_workers or (timed_out and pick(ctx) is not None)
    resumed = timed_out and ctx.spec is not None  # a run that trained before waits for its workers
    if ctx.stop_requested or enough or resumed:
        collect(ctx)
    elif timed_out:
        least = ctx.job.cluster.min_workers
        why = "no layout fits" if ready >= least else f"cluster.min_workers={least}"
        ctx.finish(
            "failed", f"too few workers: {ready} ready after {ctx.job.cluster.start_timeout_s:g} s, {why}"
        )


def _step_leaving(ctx: Context) -> None:
    if step_leaving(ctx):
        collect(ctx)


def _step_aborting(ctx: Context) -> None:
    if step_aborting(ctx):
        collect(ctx)


def _step_waiting(ctx: Context) -> None:
    if ctx.stop_requested or pick(ctx) is not None:
        collect(ctx)


STEPS: Mapping[State, Callable[[Context], None]] = {
    State.STARTING: _step_starting,
    State.RUNNING: step_running,
    State.LEAVING: _step_leaving,
    State.ABORTING: _step_aborting,
    State.COLLECTING: step_collecting,
    State.WAITING: _step_waiting,
    State.FINALISING: step_finalising,
}
