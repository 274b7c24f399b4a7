"""From sealed snapshots to a commit: upload on every node concerned, then one log entry, then release.

One checkpoint is under way at a time. Its upload starts as soon as the seals reported so far cover the
whole state. A newer complete snapshot waits, and takes over where the present one is stuck in errors or
can no longer be completed. Uploads outlive their generation: slots belong to agents, not to workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from picotron_ray.coordinator.append_queue import backoff
from picotron_ray.coordinator.lineage import on_lineage
from picotron_ray.coordinator.messages import (
    AppendCommit,
    Command,
    GenerationId,
    GenerationSpec,
    Release,
    SlotInfo,
    Upload,
    Uploaded,
)
from picotron_ray.coordinator.policies.restore_point import cover
from picotron_ray.layout.layout import Layout

State = tuple[int, GenerationId]  # step first: the order of states on one lineage


@dataclass(slots=True)
class Job:
    """One checkpoint under way; ``parts`` are the slots to upload per node."""

    state: State
    parts: dict[str, tuple[str, ...]]
    done: set[str] = field(default_factory=set)
    errors: int = 0  # failed uploads, over all nodes
    due: dict[str, float] = field(default_factory=dict)  # node not done: when to ask (again)

    @property
    def uploaded(self) -> bool:
        return self.done >= self.parts.keys()


@dataclass(slots=True)
class Checkpoints:
    """``committed``: the newest commit's step on the lineage."""

    reply_timeout_s: float
    committed: int = 0
    seals: dict[State, dict[str, tuple[SlotInfo, ...]]] = field(default_factory=dict)
    layouts: dict[State, Layout] = field(default_factory=dict)
    job: Job | None = None
    released: State | None = None
    void: list[tuple[str, State]] = field(default_factory=list)

    # --- what happened ------------------------------------------------------------------------------

    def sealed(self, state: State, node: str, slots: tuple[SlotInfo, ...], layout: Layout) -> list[Command]:
        """A node holds a pinned checkpoint snapshot; release it at once where it comes too late."""
        if self.released is not None and state <= self.released:
            return [self._release(node, state)]
        self.seals.setdefault(state, {})[node] = slots
        self.layouts[state] = layout
        return []

    def uploaded(self, event: Uploaded, now: float) -> bool:
        """Take one node's result; True where it was the last one and the commit may be appended."""
        job = self.job
        if job is None or job.state != (event.step, event.generation) or event.node not in job.parts:
            return False
        if event.node in job.done:
            return False
        if event.error:
            job.due[event.node] = now + backoff(job.errors)
            job.errors += 1
            return False
        job.done.add(event.node)
        return job.uploaded

    def settled(self, state: State, nodes: Iterable[str]) -> list[Command]:
        """A checkpoint became durable (or was given up): free it and everything older on ``nodes``."""
        if self.job is not None and self.job.state <= state:
            self.job = None
        self.seals = {key: held for key, held in self.seals.items() if key > state}
        self.layouts = {key: layout for key, layout in self.layouts.items() if key > state}
        if self.released is None or state > self.released:
            self.released = state
        return [self._release(node, state) for node in nodes]

    def outdated(self, state: State) -> bool:
        """A commit failed: give it up where a newer checkpoint is sealed as a whole; True where it was."""
        job = self.job
        newer = [key for key in self.seals if key > state and self._covered(key) is not None]
        if job is None or job.state != state or not newer:
            return False
        self.job = None
        return True

    def _covered(self, state: State) -> tuple[SlotInfo, ...] | None:
        """Slots that hold all of a state, of those that are sealed; None where some are missing."""
        return cover((s for held in self.seals[state].values() for s in held), self.layouts[state])

    def node_lost(self, node: str) -> None:
        """Its slots are gone; a checkpoint that needs them is planned anew from the other seals."""
        for held in self.seals.values():
            held.pop(node, None)
        job = self.job
        if job is not None and node in job.parts and node not in job.done:
            self.job = None

    def slot_lost(self, node: str, slot: str) -> None:
        """One slot is corrupt: a checkpoint that needs it is planned anew from the other seals."""
        for held in self.seals.values():
            if node in held:
                held[node] = tuple(info for info in held[node] if info.slot != slot)
        if self.job is not None and slot in self.job.parts.get(node, ()):
            self.job = None

    def rewound(self, newest: GenerationSpec) -> None:
        """Drop what the lineage of ``newest`` has made void."""
        for state in [s for s in self.seals if not on_lineage(newest, s[1], s[0])]:
            for node in self.seals.pop(state):
                self.voided(node, state)
            self.layouts.pop(state)
        job = self.job
        if job is not None and not on_lineage(newest, job.state[1], job.state[0]):
            self.job = None
        if self.released is not None and not on_lineage(newest, self.released[1], self.released[0]):
            self.released = None

    def voided(self, node: str, state: State) -> None:
        """A pinned snapshot that does not count: to be released once the present generation has trained.

        Not before: a release also lets go of older slots, and the state just resumed from is older.
        """
        self.void.append((node, state))

    def release_void(self) -> list[Command]:
        """The releases that waited for the present generation's first step."""
        commands: list[Command] = [self._release(node, state) for node, state in self.void]
        self.void.clear()
        return commands

    # --- what to do ---------------------------------------------------------------------------------

    def plan(self, now: float) -> list[Command]:
        """Begin the newest complete checkpoint where nothing better is under way; ask again what is due."""
        commands: list[Command] = []
        if self.job is None and not self.seals:
            return commands
        if self.job is None or (self.job.errors and not self.job.uploaded):
            for state in sorted(self.seals, reverse=True):
                if self.job is not None and state <= self.job.state:
                    break
                slots = self._covered(state)
                if slots is not None:
                    commands += self._supersede(state)
                    self.start(state, slots)
                    break
        return commands + self._ask(now)

    def start(self, state: State, slots: Iterable[SlotInfo]) -> None:
        """Make ``slots`` the checkpoint under way, unless it already is."""
        if self.job is not None and self.job.state == state:
            return
        parts: dict[str, tuple[str, ...]] = {}
        for slot in slots:
            parts[slot.node] = (*parts.get(slot.node, ()), slot.slot)
        self.job = Job(state, parts, due=dict.fromkeys(parts, 0.0))

    def _supersede(self, state: State) -> list[Command]:
        """Release what is older than ``state``: it will never be uploaded."""
        commands: list[Command] = []
        for old in [key for key in self.seals if key < state]:
            commands += [self._release(node, old) for node in self.seals.pop(old)]
            self.layouts.pop(old)
        return commands

    def _ask(self, now: float) -> list[Command]:
        job = self.job
        if job is None:
            return []
        commands: list[Command] = []
        for node, slots in job.parts.items():
            if node not in job.done and now >= job.due[node]:
                job.due[node] = now + self.reply_timeout_s
                commands.append(Upload(node, job.state[1], job.state[0], slots))
        return commands

    def commit(self) -> AppendCommit:
        """The log entry for the job whose uploads are complete."""
        assert self.job is not None
        return AppendCommit(self.job.state[1], self.job.state[0], tuple(sorted(self.job.parts)))

    def _release(self, node: str, state: State) -> Release:
        return Release(node, state[1], state[0], self.committed)

    @property
    def wake_at(self) -> float | None:
        job = self.job
        waiting = () if job is None else [due for node, due in job.due.items() if node not in job.done]
        return min(waiting, default=None)


def known_layouts(specs: Iterable[GenerationSpec]) -> Mapping[GenerationId, Layout]:
    """Layouts of generations and, where their own entry is missing, of those that they resumed from."""
    found: dict[GenerationId, Layout] = {}
    for spec in specs:
        if spec.source.generation is not None and spec.source.layout is not None:
            found.setdefault(spec.source.generation, spec.source.layout)
        found[spec.id] = spec.layout
    return found
