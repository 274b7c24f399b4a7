"""Histories of a simulated run: which states count, by what was heard and by the states that exist.

A generation counts for a coordinator that has heard of a step of it, or can know of a commit or a complete
state of it. One without any step does not. Of others, of which nothing is known or left, nobody can tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.protocols import CoordinatorProtocol
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind

if TYPE_CHECKING:
    from picotron_ray.coordinator.simulator.checks import Checks

Chain = dict[m.GenerationId, int]
"""Last step that counts of each generation of a history."""


def valid(chain: Chain, generation: m.GenerationId, step: int) -> bool:
    """Whether a state is part of a history."""
    return generation in chain and step <= chain[generation]


def goes_back(shell: CoordinatorProtocol, spec: m.GenerationSpec, chains: list[Chain]) -> bool:
    """Whether a launch is a rewind, maybe one that a launch before was to do and came to nothing."""
    newest = shell.newest
    if newest is None or len(spec.rewinds) > len(newest.rewinds):
        return newest is not None
    doubtful = len(chains) > 1 or newest.id not in chains[0]
    return doubtful and bool(spec.rewinds) and spec.rewinds[-1].to_step == spec.resume_step


def _at_work(shell: CoordinatorProtocol, spec: m.GenerationSpec) -> bool:
    memory = shell.machine.memory
    running = (MachineState.RUNNING, MachineState.LEAVING, MachineState.ABORTING)
    return memory.spec is not None and memory.spec.id == spec.id and memory.state in running


class Histories:
    """Watcher of what every coordinator can know."""

    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self._heard: set[tuple[int, m.GenerationId]] = set()  # coordinator, generation: a step of it
        self._told_bad: set[tuple[int, str]] = set()  # coordinator, manifest that a member found damaged

    def handled(self, shell: CoordinatorProtocol, event: m.Event) -> None:
        """Note what a coordinator hears of a generation at work."""
        generation, step = None, 0
        if isinstance(event, m.Heartbeat) and event.steps:
            generation, step = event.generation, max(event.steps.values())
        elif isinstance(event, m.Outcome | m.SnapshotSealed):
            generation, step = event.generation, event.step
        spec = None if generation is None else self.checks.specs.get(generation)
        if spec is None:
            return
        found = isinstance(event, m.Outcome) and event.detail == f"corrupt:{spec.source.manifest}"
        if found and event in shell.machine.memory.outcomes.values():
            self._told_bad.add((id(shell), spec.source.manifest))
        bad_step = isinstance(event, m.Outcome) and event.kind is FailureKind.NUMERICS
        if step > spec.resume_step or bad_step:
            self._heard.add((id(shell), spec.id))

    def launched(self, shell: CoordinatorProtocol, spec: m.GenerationSpec) -> None:
        """Check that no commit is tried again that was found damaged."""
        if (id(shell), spec.source.manifest) in self._told_bad:
            self.checks.sim.violation(f"{spec.id} resumes from {spec.source.manifest}, known to be damaged")

    def chains(self, shell: CoordinatorProtocol, newest: m.GenerationSpec | None) -> list[Chain]:
        """Histories that may count for a coordinator, the newest first; one where there is no doubt.

        Args:
            newest: generation that it launched last, or knows to be the newest.
        """
        found: list[Chain] = []
        at = newest
        while at is not None:
            counts = _at_work(shell, at) or self._came_to_something(shell, at)
            if counts or self._was_at_work(at):
                found.append(self.walk(at))
            if counts:
                break
            at = self._before(shell, at)
        return found or [self.walk(newest)]

    def counts(self, shell: CoordinatorProtocol, generation: m.GenerationId, step: int) -> bool:
        """Whether a state is part of a history that may count."""
        newest = shell.machine.memory.spec or shell.newest
        return newest is None or any(valid(x, generation, step) for x in self.chains(shell, newest))

    def rewound(self, shell: CoordinatorProtocol, spec: m.GenerationSpec, chains: list[Chain]) -> bool:
        """Whether a launch is a rewind, which is checked; one that came to nothing must be done again."""
        say = self.checks.sim.violation
        if not goes_back(shell, spec, chains):
            head = self.checks.specs.get(max(chains[0], default=spec.id), spec)
            owed = () if shell.newest is None else shell.newest.rewinds[len(head.rewinds) :]
            if owed and len(chains) == 1 and spec.rewinds == head.rewinds:
                say(f"{spec.id} forgets the rewind for step {owed[-1].bad_step}")
            return False
        bad_step = spec.rewinds[-1].bad_step
        if spec.resume_step >= bad_step:
            say(f"{spec.id} rewinds for step {bad_step} to a later one")
        wanted = bad_step - self.checks.sim.job.elastic.rewind_steps
        old = [[s for s in self.checks.commit_steps(shell, chain) if s <= wanted] for chain in chains]
        best = min(max(steps, default=0) for steps in old)
        if spec.resume_step < best:
            say(f"{spec.id} rewinds for step {bad_step} to step {spec.resume_step}, and {best} would do")
        return True

    def went_back(self, chains: list[Chain], step: int) -> bool:
        """Whether a history has a generation that a user sent back to the commit of that step."""
        return any(
            (spec := self.checks.specs[generation]).source.kind == "commit" and spec.resume_step == step
            for chain in chains
            for generation in chain
        )

    def _was_at_work(self, spec: m.GenerationSpec) -> bool:
        generation = self.checks.sim.generations.get(spec.id)
        return generation is not None and generation.step > spec.resume_step

    def _before(self, shell: CoordinatorProtocol, spec: m.GenerationSpec) -> m.GenerationSpec | None:
        """The generation before, of those that a coordinator can know: its own, logged ones and ancestors."""
        specs = self.checks.specs
        known = {logged.id for logged in self.checks.sim.storage.generations()} | self.walk(spec).keys()
        known |= {generation for generation in specs if generation.term == shell.machine.memory.term}
        older = max((generation for generation in known & specs.keys() if generation < spec.id), default=None)
        return None if older is None else specs[older]

    def _came_to_something(self, shell: CoordinatorProtocol, spec: m.GenerationSpec) -> bool:
        if (id(shell), spec.id) in self._heard:
            return True
        bad, own = self.checks.sim.bad_manifests, {spec.id: 1 << 60}
        if any(c.generation == spec.id and c.manifest not in bad for c in shell.commits):
            return True
        return any(True for _ in self.checks.slot_steps(shell, own))

    def walk(self, newest: m.GenerationSpec | None) -> Chain:
        """Follow the sources back from a generation."""
        chain: Chain = {}
        bound, at = 1 << 60, newest
        while at is not None:
            chain[at.id] = bound
            bound = min(bound, at.resume_step)
            source = at.source.generation
            at = None if source is None else self.checks.specs.get(source)
        return chain
