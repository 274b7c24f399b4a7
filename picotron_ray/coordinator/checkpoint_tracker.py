"""Tracker of checkpoints, from sealed snapshots to a commit.

The nodes concerned upload their slots, one log entry follows, then the slots are released. One checkpoint is
under way at a time. Its upload starts as soon as the seals reported so far cover the whole state. A newer
complete snapshot waits. It takes over where the present one is stuck in errors or cannot be completed.
Uploads outlive their generation: slots belong to agents, not to workers.
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

StateKey = tuple[int, GenerationId]  # step first: the order of states on one lineage


@dataclass(slots=True)
class PendingCheckpoint:
    """One checkpoint under way; ``parts`` are the slots to upload per node."""

    state: StateKey
    parts: dict[str, tuple[str, ...]]
    done: set[str] = field(default_factory=set)
    errors: int = 0  # failed uploads, over all nodes
    due: dict[str, float] = field(default_factory=dict)  # node not done: when to ask (again)
    failing: set[str] = field(default_factory=set)  # nodes whose newest answer was an error

    @property
    def uploaded(self) -> bool:
        return self.done >= self.parts.keys()


@dataclass(slots=True)
class CheckpointTracker:
    """Checkpoints of the lineage; ``committed`` is the newest commit's step."""

    reply_timeout_s: float
    committed: int = 0
    seals: dict[StateKey, dict[str, tuple[SlotInfo, ...]]] = field(default_factory=dict)
    layouts: dict[StateKey, Layout] = field(default_factory=dict)
    pending: PendingCheckpoint | None = None
    released: StateKey | None = None
    void: list[tuple[str, StateKey]] = field(default_factory=list)

    # --- what happened ------------------------------------------------------------------------------

    def sealed(
        self, state: StateKey, node: str, slots: tuple[SlotInfo, ...], layout: Layout
    ) -> list[Command]:
        """Note a pinned checkpoint snapshot of a node; one that comes too late is released at once."""
        if self.released is not None and state <= self.released:
            return [self._release(node, state)]
        self.seals.setdefault(state, {})[node] = slots
        self.layouts[state] = layout
        return []

    def uploaded(self, event: Uploaded, now: float) -> bool:
        """Take one node's result; True where it was the last one, so that the commit may be appended."""
        pending = self.pending
        if (
            pending is None
            or pending.state != (event.step, event.generation)
            or event.node not in pending.parts
        ):
            return False
        if event.node in pending.done:
            return False
        if event.error:
            pending.due[event.node] = now + backoff(pending.errors)
            pending.errors += 1
            pending.failing.add(event.node)
            return False
        pending.failing.discard(event.node)
        pending.done.add(event.node)
        return pending.uploaded

    def parts_gone(self, state: StateKey, now: float) -> bool:
        """Have all nodes upload again what storage has lost; False: no checkpoint of it is under way."""
        pending = self.pending
        if pending is None or pending.state != state:
            return False
        pending.done.clear()
        pending.failing.update(pending.parts)
        pending.due = dict.fromkeys(pending.parts, now + backoff(pending.errors))
        pending.errors += 1
        return True

    def settled(self, state: StateKey, nodes: Iterable[str]) -> list[Command]:
        """Free a checkpoint that became durable, or was given up, and everything older on ``nodes``."""
        if self.pending is not None and self.pending.state <= state:
            self.pending = None
        self.seals = {key: held for key, held in self.seals.items() if key > state}
        self.layouts = {key: layout for key, layout in self.layouts.items() if key > state}
        self.released = state if self.released is None else max(self.released, state)
        return [self._release(node, state) for node in nodes]

    def outdated(self, state: StateKey) -> bool:
        """Give up a failed commit if a newer checkpoint is sealed as a whole; return whether it was."""
        pending = self.pending
        newer = [key for key in self.seals if key > state and self._covered(key) is not None]
        if pending is None or pending.state != state or not newer:
            return False
        self.pending = None
        return True

    def _covered(self, state: StateKey) -> tuple[SlotInfo, ...] | None:
        """Slots that hold all of a state, of those that are sealed; None where some are missing."""
        return cover((s for held in self.seals[state].values() for s in held), self.layouts[state])

    def node_lost(self, node: str) -> None:
        """Forget the slots of a node; a checkpoint that needs them is planned anew from the other seals."""
        for held in self.seals.values():
            held.pop(node, None)
        pending = self.pending
        if pending is not None and node in pending.parts and node not in pending.done:
            self.pending = None

    def slot_lost(self, node: str, slot: str) -> None:
        """Forget a corrupt slot; a checkpoint that needs it is planned anew from the other seals."""
        for held in self.seals.values():
            if node in held:
                held[node] = tuple(info for info in held[node] if info.slot != slot)
        if self.pending is not None and slot in self.pending.parts.get(node, ()):
            self.pending = None

    def forget(self, state: StateKey) -> None:
        """Drop a checkpoint that is incomplete, without a release: its slots stay where they are."""
        self.seals.pop(state, None)
        self.layouts.pop(state, None)

    def rewound(self, newest: GenerationSpec) -> None:
        """Drop what the lineage of ``newest`` has made void."""
        for state in [s for s in self.seals if not on_lineage(newest, s[1], s[0])]:
            for node in self.seals.pop(state):
                self.voided(node, state)
            self.layouts.pop(state)
        pending = self.pending
        if pending is not None and not on_lineage(newest, pending.state[1], pending.state[0]):
            self.pending = None
        if self.released is not None and not on_lineage(newest, self.released[1], self.released[0]):
            self.released = None

    def voided(self, node: str, state: StateKey) -> None:
        """Note a pinned snapshot that does not count; its release waits for the generation's first step.

        An earlier release would also free older slots, among them the state that was just resumed from.
        """
        self.void.append((node, state))

    def release_void(self) -> list[Command]:
        """Return the releases that waited for the present generation's first step."""
        commands: list[Command] = [self._release(node, state) for node, state in self.void]
        self.void.clear()
        return commands

    # --- what to do ---------------------------------------------------------------------------------

    def plan(self, now: float) -> list[Command]:
        """Begin the newest complete checkpoint where nothing better is under way; ask again what is due."""
        commands: list[Command] = []
        if self.pending is None and not self.seals:
            return commands
        if self.pending is None or (self.pending.errors and not self.pending.uploaded):
            for state in sorted(self.seals, reverse=True):
                if self.pending is not None and state <= self.pending.state:
                    break
                slots = self._covered(state)
                if slots is not None:
                    commands += self._supersede(state)
                    self.start(state, slots)
                    break
        return commands + self._ask(now)

    def start(self, state: StateKey, slots: Iterable[SlotInfo]) -> None:
        """Make ``slots`` the checkpoint under way, unless it already is."""
        if self.pending is not None and self.pending.state == state:
            return
        parts: dict[str, tuple[str, ...]] = {}
        for slot in slots:
            parts[slot.node] = (*parts.get(slot.node, ()), slot.slot)
        self.pending = PendingCheckpoint(state, parts, due=dict.fromkeys(parts, 0.0))

    def _supersede(self, state: StateKey) -> list[Command]:
        """Release what is older than ``state``: it will never be uploaded."""
        commands: list[Command] = []
        for old in [key for key in self.seals if key < state]:
            commands += [self._release(node, old) for node in self.seals.pop(old)]
            self.layouts.pop(old)
        return commands

    def _ask(self, now: float) -> list[Command]:
        pending = self.pending
        if pending is None:
            return []
        commands: list[Command] = []
        for node, slots in pending.parts.items():
            if node not in pending.done and now >= pending.due[node]:
                pending.due[node] = now + self.reply_timeout_s
                commands.append(Upload(node, pending.state[1], pending.state[0], slots))
        return commands

    def commit(self) -> AppendCommit:
        """Return the log entry for the checkpoint whose uploads are complete."""
        assert self.pending is not None
        return AppendCommit(self.pending.state[1], self.pending.state[0], tuple(sorted(self.pending.parts)))

    def _release(self, node: str, state: StateKey) -> Release:
        return Release(node, state[1], state[0], self.committed)

    @property
    def wake_at(self) -> float | None:
        pending = self.pending
        waiting = (
            () if pending is None else [due for node, due in pending.due.items() if node not in pending.done]
        )
        return min(waiting, default=None)


def known_layouts(specs: Iterable[GenerationSpec]) -> Mapping[GenerationId, Layout]:
    """Layouts of generations and, where their own entry is missing, of those that they resumed from."""
    found: dict[GenerationId, Layout] = {}
    for spec in specs:
        if spec.source.generation is not None and spec.source.layout is not None:
            found.setdefault(spec.source.generation, spec.source.layout)
        found[spec.id] = spec.layout
    return found
