"""Promptness: what is due is done within seconds, once nothing disturbs it any more.

Every state but training itself ends soon, steps follow each other, the silence of a node and a notice that it
is to go are acted on, and pins are released. A fault that is still at work, or was a moment ago, excuses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.protocols import (
    CoordinatorProtocol,
    GenerationProtocol,
    NodeProtocol,
    WorkerProtocol,
)
from picotron_ray.coordinator.states import MachineState

if TYPE_CHECKING:
    from picotron_ray.coordinator.simulator.world import Sim

LONGEST_S: Mapping[MachineState, float] = {
    MachineState.ABORTING: 8.0,  # an interrupt, then three kills: 2 s each
    MachineState.LEAVING: 12.0,  # beside the step at hand: from the first to leave to the last, then a kill
    MachineState.COLLECTING: 11.0,  # three rounds of questions of 2 s, and a commit that is awaited for 5 s
    MachineState.WAITING: 60.0,  # workers start; starts that failed are put off for 15 s, then for 30 s
    MachineState.STARTING: 63.0,  # cluster.start_timeout_s
    MachineState.FINALISING: 55.0,  # an answer of storage that was lost is asked for after 50 s
    MachineState.RUNNING: 8.0,  # from step to step, beside the step at hand: a rendezvous of 5 s
}
LATE_S = 4.0  # a verdict on silence may come so long after its time
ASKED_AGAIN_S = 60.0  # by then storage was asked again for an answer that was lost, and gave it
RELEASED_S = 4.0  # after a step, or a commit: until what it frees is unpinned


class Promptness:
    """Watcher of delays in one simulation."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self._state, self._entered = MachineState.NEW, 0.0
        self._stepped = 0.0
        self._void: set[m.SlotIdentity] = set()  # what a first step made void
        self._shell: CoordinatorProtocol | None = None

    def calm_since(self) -> float:
        """Time at which the last disturbance was over; in the future while one is at work."""
        sim = self.sim
        storage, shell = sim.storage, sim.shell
        nodes = (t for node in sim.nodes.values() for t in node.disturbed_until())
        own = () if shell is None else (shell.paused_until, shell.born_at, shell.planner.silent_until)
        return max(
            *(sim.struck_at, sim.noise_until, sim.changed_at, sim.parted_until, storage.down_until),
            sim.start_hangs_until,
            *(storage.slow_until, storage.hung_until, storage.mute_until, *own, *nodes),
        )

    def ticked(self, shell: CoordinatorProtocol) -> None:
        """Check after every tick of the present coordinator how long it has been in its state."""
        sim, state = self.sim, shell.machine.memory.state
        if sim.shell is not shell:
            return
        if state not in LONGEST_S:
            self._state = state
            return
        self._called(shell)
        if shell is not self._shell or state is not self._state:
            self._shell, self._state, self._entered = shell, state, sim.now
        since = max(self._entered, self.calm_since())
        if state is MachineState.RUNNING:
            since = max(since, self._stepped)
        steps_s = 2 * sim.step_s if state in (MachineState.RUNNING, MachineState.LEAVING) else 0.0
        if sim.now - since > LONGEST_S[state] + steps_s:
            sim.violation(f"{state} for {sim.now - since:.0f} s, and nothing disturbs it")

    def _called(self, shell: CoordinatorProtocol) -> None:
        """Check that a generation is given up whose members were never called, whatever it waits for."""
        sim, memory = self.sim, shell.machine.memory
        if memory.state not in (MachineState.RUNNING, MachineState.LEAVING) or memory.spec is None:
            return
        if memory.spec.id not in sim.checks.specs:  # the order is about to be given
            return
        limit_s = sim.job.elastic.first_step_timeout_s + LATE_S
        since = max(sim.checks.launched_at, shell.paused_until, shell.born_at)
        if memory.spec.id not in sim.generations and sim.now - since > limit_s:
            sim.violation(f"nobody was called for {memory.spec.id} in {sim.now - since:.0f} s")

    def stepped(self, generation: GenerationProtocol) -> None:
        """Note a step; the first one of a generation frees what it made void."""
        sim, shell = self.sim, self.sim.shell
        self._stepped = sim.now
        spec = generation.spec
        if shell is None or generation.step != spec.resume_step + 1:
            return
        void = [
            held.info
            for node in sim.nodes.values()
            for held in node.slots.values()
            if held.pinned and held.info.generation < spec.id and not _counts(spec, held.info)
            if (node.name, held.info.generation, held.info.step) in shell.told_seals and sim.reachable(node)
            if held.info.identity not in self._void and held.info.slot not in node.kept
        ]
        self._void.update(info.identity for info in void)  # a release is told once, and may be lost
        if void and sim.now > self.calm_since() + RELEASED_S:
            sim.after(RELEASED_S, self._still_pinned, shell, void, "is void")

    def committed(self, shell: CoordinatorProtocol, event: m.Appended) -> None:
        """Expect that a commit frees what it holds and what is older."""
        sim = self.sim
        if sim.shell is not shell or sim.now < self.calm_since():
            return
        key = event.generation, event.step
        freed = [
            held.info
            for node in sim.nodes.values()
            if node.name in shell.machine.memory.roster.nodes and sim.reachable(node)
            for held in node.slots.values()
            if held.pinned and (held.info.generation, held.info.step) <= key
        ]
        if freed:
            sim.after(RELEASED_S, self._still_pinned, shell, freed, f"step {event.step} is committed")

    def sealed(self, shell: CoordinatorProtocol, event: m.SnapshotSealed) -> None:
        """Expect that a snapshot is freed that was told of after a newer commit."""
        spec, counts, key = shell.newest, self.sim.checks.counts, (event.step, event.generation)
        newer = (c for c in shell.commits if (c.step, c.generation) >= key)
        if counts(spec, *key[::-1]) and any(counts(spec, c.generation, c.step) for c in newer):
            self._expect_freed(shell, event.node, [key], "a newer one was committed before")

    def uploading(self, shell: CoordinatorProtocol, command: m.Upload) -> None:
        """Expect that an upload frees what is older, which will never be uploaded.

        While a generation trains; else the state to go on from may go before a snapshot that waits.
        """
        if shell.machine.memory.state is not MachineState.RUNNING:
            return
        key = command.step, command.generation
        told = {(step, generation) for node, generation, step in shell.told_seals if node == command.node}
        older = [
            k for k in told if key in told and k < key and self.sim.checks.counts(shell.newest, k[1], k[0])
        ]
        self._expect_freed(shell, command.node, older, f"step {command.step} is uploaded in its place")

    def _expect_freed(
        self, shell: CoordinatorProtocol, name: str, states: list[tuple[int, m.GenerationId]], why: str
    ) -> None:
        sim = self.sim
        node = sim.nodes.get(name)
        known = name in shell.machine.memory.roster.nodes
        if node is None or sim.shell is not shell or not known or not sim.reachable(node):
            return
        held = [
            held.info
            for held in node.slots.values()
            if held.pinned and (held.info.step, held.info.generation) in states
        ]
        if held:
            sim.after(RELEASED_S, self._still_held, shell, node, held, why)

    def _still_held(
        self, shell: CoordinatorProtocol, node: NodeProtocol, held: list[m.SlotInfo], why: str
    ) -> None:
        """Check what storage has no part in."""
        sim = self.sim
        if sim.shell is shell and sim.now > shell.paused_until + RELEASED_S and sim.reachable(node):
            self._pinned(held, why)

    def _still_pinned(self, shell: CoordinatorProtocol, freed: list[m.SlotInfo], why: str) -> None:
        sim = self.sim
        if sim.shell is not shell or sim.now < self.calm_since() + RELEASED_S:
            return
        self._pinned(freed, why)

    def _pinned(self, freed: list[m.SlotInfo], why: str) -> None:
        for info in freed:
            node = self.sim.nodes.get(info.node)
            held = None if node is None or info.slot in node.kept else node.slots.get(info.slot)
            if held is not None and held.pinned and held.info.identity == info.identity:
                self.sim.violation(f"step {info.step} in {info.slot} on {info.node} is still pinned: {why}")

    def skipped(self, node: NodeProtocol, generation: GenerationProtocol) -> None:
        """Check that there is room for a snapshot, long after answers were lost and asked for again."""
        young = (
            generation.step <= generation.spec.resume_step + 2
        )  # it may have to start anew from its source
        if not young and self.sim.now > self.calm_since() + ASKED_AGAIN_S:
            self.sim.violation(f"no room on {node.name} for step {generation.step}: everything is pinned")

    def removed(self, node: NodeProtocol) -> None:
        """Expect a verdict on a node that went without a word."""
        timeout_s = self.sim.job.elastic.node_timeout_s
        self.sim.after(timeout_s + LATE_S, self._counted_still, self.sim.shell, node.name, self.sim.now)

    def _counted_still(self, shell: CoordinatorProtocol | None, name: str, at: float) -> None:
        if shell is None or self.sim.shell is not shell or shell.paused_until > at or shell.born_at > at:
            return
        if name in shell.machine.memory.roster.nodes:
            self.sim.violation(f"{name} went {self.sim.now - at:.0f} s ago without a word, and still counts")

    def unpaged(self, workers: Sequence[WorkerProtocol]) -> None:
        """Expect the end of members whose pages are gone."""
        elastic = self.sim.job.elastic
        limit_s = elastic.node_timeout_s + 2 * elastic.heartbeat_s + LATE_S
        for worker in workers:
            self.sim.after(limit_s, self._unseen_still, worker, worker.generation, self.sim.now)

    def _unseen_still(self, worker: WorkerProtocol, then: GenerationProtocol | None, at: float) -> None:
        sim, shell = self.sim, self.sim.shell
        if shell is None or then is None or self.calm_since() > at or sim.worker(worker.name) is not worker:
            return
        memory = shell.machine.memory
        at_work = memory.state in (MachineState.RUNNING, MachineState.LEAVING) and memory.spec == then.spec
        if at_work and not then.ended and not worker.paged:
            sim.violation(f"{worker.name} has had no page for {sim.now - at:.0f} s, and still counts")

    def left(self, node: NodeProtocol, noticed_at: float) -> None:
        """Check that a node is not used any more when its time is over, where others could do the work."""
        sim, shell = self.sim, self.sim.shell
        if shell is None or self.calm_since() > noticed_at:
            return
        others = [w for n in sim.nodes.values() if n is not node for w in n.workers.values() if w.ready]
        spec = shell.newest
        if spec is None or len(others) < 2 or shell.machine.memory.state is not MachineState.RUNNING:
            return
        if shell.machine.memory.cap is not None:
            return
        if any(member.node == node.name for member in spec.members):
            sim.violation(f"{node.name} goes, and {spec.id} still uses it beside {len(others)} other workers")


def _counts(spec: m.GenerationSpec, info: m.SlotInfo) -> bool:
    return any(link.generation == info.generation and info.step <= link.through for link in spec.lineage)
