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
    StateId,
    Upload,
    Uploaded,
)
from picotron_ray.coordinator.policies.restore_point import cover
from picotron_ray.layout.layout import Layout

StateKey = tuple[int, GenerationId]  # step first: the order of states on one lineage


@dataclass(slots=True)
class PendingCheckpoint:
    """One checkpoint under way; ``parts`` are the slots to upload per node.

    ``due`` and ``failing`` speak of nodes that are not done. ``unproven``: every node that holds the state is
    asked for ledger lines that the others did not have; what they do not have either is left out.
    """

    state: StateKey
    parts: dict[str, tuple[str, ...]]
    done: set[str] = field(default_factory=set)
    errors: int = 0  # failed uploads, over all nodes
    due: dict[str, float] = field(default_factory=dict)  # node not done: when to ask (again)
    failing: set[str] = field(default_factory=set)  # nodes whose newest answer was an error
    next_due: float = 0.0  # the first of ``due``, or earlier
    asked_at: float | None = None  # when the first upload was asked for
    unproven: bool = False

    @property
    def uploaded(self) -> bool:
        return len(self.done) == len(self.parts)

    def ask_at(self, at: float, *nodes: str) -> None:
        """Have nodes asked (again) at a time."""
        self.due.update(dict.fromkeys(nodes, at))
        self.find_next()

    def find_next(self) -> None:
        """Find when the next node is due."""
        self.next_due = min((due for node, due in self.due.items() if node not in self.done), default=0.0)


@dataclass(slots=True)
class SealedState:
    """Slots of one state that were reported as sealed; which parts of it are whole is kept as they come."""

    layout: Layout
    held: dict[str, tuple[SlotInfo, ...]] = field(default_factory=dict)  # by node
    parts: dict[tuple[int, int], set[int]] = field(default_factory=dict)  # (group, count): fragments seen
    whole: set[int] = field(default_factory=set)  # groups of which nothing is missing

    def add(self, node: str, slots: tuple[SlotInfo, ...]) -> None:
        if self.held.get(node) == slots:
            return
        before = self.held.get(node)
        self.held[node] = slots
        if before is not None:
            self._count_anew()
        else:
            self._count(slots)

    def remove(self, node: str) -> None:
        """Forget what a node held."""
        if self.held.pop(node, None) is not None:
            self._count_anew()

    def remove_slot(self, node: str, slot: str) -> None:
        if node in self.held:
            self.held[node] = tuple(info for info in self.held[node] if info.slot != slot)
            self._count_anew()

    def _count_anew(self) -> None:
        self.parts.clear()
        self.whole.clear()
        for slots in self.held.values():
            self._count(slots)

    def _count(self, slots: Iterable[SlotInfo]) -> None:
        for slot in slots:
            for part in slot.fragments:
                seen = self.parts.setdefault((part.group, part.count), set())
                seen.add(part.index)
                if len(seen) >= part.count:
                    self.whole.add(part.group)

    def covered(self) -> tuple[SlotInfo, ...] | None:
        """Slots that hold all of the state; None where some are missing."""
        if len(self.whole) < self.layout.state_groups:
            return None
        return cover((slot for held in self.held.values() for slot in held), self.layout)


@dataclass(slots=True)
class CheckpointTracker:
    """Checkpoints of the lineage.

    Fields:
        committed: step of the newest commit.
        released: newest state that was settled.
        void: by node, snapshots that do not count and wait for their release.
        freed: by node, newest state up to which its pins were released.
        ledger_gone: a commit has failed since the last one as its parts had not all lines of the ledger.
    """

    reply_timeout_s: float
    committed: int = 0
    seals: dict[StateKey, SealedState] = field(default_factory=dict)
    pending: PendingCheckpoint | None = None
    released: StateKey | None = None
    void: dict[str, set[StateKey]] = field(default_factory=dict)
    freed: dict[str, StateId] = field(default_factory=dict)
    ledger_gone: bool = False

    # --- what happened ------------------------------------------------------------------------------

    def sealed(
        self, state: StateKey, node: str, slots: tuple[SlotInfo, ...], layout: Layout
    ) -> list[Command]:
        """Note a pinned checkpoint snapshot of a node; one that comes too late is released at once."""
        if state[0] <= self.committed or (self.released is not None and state <= self.released):
            return [self.release(node, state)]
        overtaken = self.pending is not None and state < self.pending.state
        if overtaken and state not in self.seals:  # it gave way to the one under way
            return [self.release(node, state)]
        self.seals.setdefault(state, SealedState(layout)).add(node, slots)
        return []

    def uploaded(self, event: Uploaded, now: float) -> bool:
        """Take one node's result; True where it was the last one, so that the commit may be appended.

        The end of an earlier upload of other slots of the state says nothing of those that are asked for now.
        """
        pending = self.pending
        if (
            pending is None
            or pending.state != (event.step, event.generation)
            or event.node not in pending.parts
        ):
            return False
        if event.node in pending.done or (event.slots and event.slots != pending.parts[event.node]):
            return False
        if event.error:
            pending.ask_at(now + backoff(pending.errors), event.node)
            pending.errors += 1
            pending.failing.add(event.node)
            return False
        pending.failing.discard(event.node)
        pending.done.add(event.node)
        return pending.uploaded

    def parts_gone(self, state: StateKey, now: float, ledger: bool = False) -> bool:
        """Have all nodes upload again what storage has lost; False: no checkpoint of it is under way.

        Args:
            ledger: what is gone are lines of the ledger: those are asked that hold the state as well.
        """
        pending = self.pending
        if pending is None or pending.state != state:
            return False
        if ledger:
            self.ledger_gone = True
            self._ask_all_holders(pending)
        pending.done.clear()
        pending.failing.update(pending.parts)
        pending.ask_at(now + backoff(pending.errors), *pending.parts)
        pending.errors += 1
        return True

    def _ask_all_holders(self, pending: PendingCheckpoint) -> None:
        """Have every node take part that holds the state: it may have ledger lines that others lost."""
        pending.unproven = True
        held = self.seals[pending.state].held if pending.state in self.seals else {}
        more = {node: tuple(slot.slot for slot in slots) for node, slots in held.items() if slots}
        pending.parts = {**more, **pending.parts}

    def settled(self, state: StateKey, nodes: Iterable[str]) -> list[Command]:
        """Free a checkpoint that became durable, or was given up, and everything older on ``nodes``."""
        if self.pending is not None and self.pending.state <= state:
            self.pending = None
        self.seals = {key: held for key, held in self.seals.items() if key > state}
        self.released = state if self.released is None else max(self.released, state)
        self.ledger_gone = False
        return [self.release(node, state) for node in nodes]

    def outdated(self, state: StateKey) -> bool:
        """Give up a failed commit if a newer checkpoint is sealed as a whole; return whether it was."""
        pending = self.pending
        newer = [key for key in self.seals if key > state and self.seals[key].covered() is not None]
        if pending is None or pending.state != state or not newer:
            return False
        self.pending = None
        return True

    def passed_over(self, state: StateKey, parts_gone: bool) -> bool:
        """Whether nothing is done any more for a commit of ``state`` that failed.

        Args:
            parts_gone: it has to be uploaded again; else another try may do.
        """
        pending = self.pending
        return parts_gone if pending is None else pending.state != state

    def took_s(self, state: StateKey, now: float) -> float | None:
        """Seconds from the first upload of ``state`` until now; None where it is not under way."""
        pending = self.pending
        known = pending is not None and pending.state == state and pending.asked_at is not None
        return now - pending.asked_at if known and pending and pending.asked_at is not None else None

    def sealed_by(self, generation: GenerationId) -> bool:
        """Whether a whole state of this generation is sealed, pinned and not yet committed."""
        return any(
            state[1] == generation and sealed.covered() is not None for state, sealed in self.seals.items()
        )

    def newest_whole(self) -> StateKey | None:
        """Newest state that is sealed as a whole, and that storage has not all of."""
        pending = self.pending
        stored = pending.state if pending is not None and pending.uploaded else None
        whole = (state for state, sealed in self.seals.items() if sealed.covered() is not None)
        return max((state for state in whole if state != stored), default=None)

    def needs(self, node: str) -> bool:
        """Whether the checkpoint under way waits for slots of this node."""
        return self.pending is not None and node in self.pending.parts and node not in self.pending.done

    def pinned_on(self, node: str) -> dict[StateKey, tuple[SlotInfo, ...]]:
        """States of which a node holds pinned slots, also those that only wait for their release."""
        held: dict[StateKey, tuple[SlotInfo, ...]] = dict.fromkeys(self.void.get(node, ()), ())
        return held | {s: sealed.held[node] for s, sealed in self.seals.items() if node in sealed.held}

    def node_lost(self, node: str) -> None:
        """Forget the slots of a node; a checkpoint that needs them is planned anew from the other seals."""
        self.freed.pop(node, None)
        for sealed in self.seals.values():
            sealed.remove(node)
        pending = self.pending
        if pending is not None and node in pending.parts and node not in pending.done:
            self.pending = None

    def slot_lost(self, node: str, slot: str, state: StateKey) -> None:
        """Forget a state's corrupt or overwritten slot; a checkpoint that needs it is planned anew."""
        if state in self.seals:
            self.seals[state].remove_slot(node, slot)
        pending = self.pending
        if pending is not None and pending.state == state and slot in pending.parts.get(node, ()):
            self.pending = None

    def forget(self, state: StateKey) -> None:
        """Drop a checkpoint that is incomplete, without a release: its slots stay where they are."""
        self.seals.pop(state, None)

    def rewound(self, newest: GenerationSpec) -> None:
        """Drop what the lineage of ``newest`` has made void."""
        for state in [s for s in self.seals if not on_lineage(newest, s[1], s[0])]:
            for node in self.seals.pop(state).held:
                self.voided(node, state)
        pending = self.pending
        if pending is not None and not on_lineage(newest, pending.state[1], pending.state[0]):
            self.pending = None
        if self.released is not None and not on_lineage(newest, self.released[1], self.released[0]):
            self.released = None

    def voided(self, node: str, state: StateKey) -> None:
        """Note a pinned snapshot that does not count; its release waits for the generation's first step.

        An earlier release would also free older slots, among them the state that was just resumed from.
        """
        self.void.setdefault(node, set()).add(state)  # agents tell every new coordinator what they hold

    def release_void(self) -> list[Command]:
        """Return the releases that waited for the present generation's first step."""
        void, self.void = self.void, {}
        newest = {
            node: max((generation, step) for step, generation in states) for node, states in void.items()
        }
        return [self.release(node, (step, generation)) for node, (generation, step) in newest.items()]

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
                slots = self.seals[state].covered()
                if slots is not None:
                    self.pending = None
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
        self.pending = pending = PendingCheckpoint(state, parts)
        if self.ledger_gone:
            self._ask_all_holders(pending)
        pending.due = dict.fromkeys(pending.parts, 0.0)

    def _supersede(self, state: StateKey) -> list[Command]:
        """Release what is older than ``state``: it will never be uploaded."""
        newest: dict[str, StateKey] = {}
        for old in sorted(key for key in self.seals if key < state):
            newest.update(dict.fromkeys(self.seals.pop(old).held, old))
        return [self.release(node, old) for node, old in newest.items()]

    def _ask(self, now: float) -> list[Command]:
        pending = self.pending
        if pending is None or now < pending.next_due:
            return []
        commands: list[Command] = []
        if pending.asked_at is None:
            pending.asked_at = now
        for node, slots in pending.parts.items():
            if node not in pending.done and now >= pending.due[node]:
                pending.due[node] = now + self.reply_timeout_s
                commands.append(Upload(node, pending.state[1], pending.state[0], slots))
        pending.find_next()
        return commands

    def commit(self) -> AppendCommit:
        """Return the log entry for the checkpoint whose uploads are complete."""
        assert self.pending is not None
        pending = self.pending
        nodes = tuple(sorted(pending.parts))
        return AppendCommit(pending.state[1], pending.state[0], nodes, pending.unproven)

    def release(self, node: str, state: StateKey) -> Release:
        """Return the release of a node's pins up to a state, and to whatever was released there before.

        So it stands for all before it, of which one may not have arrived. States that are still to be
        committed stay: a void one may be younger than they are.
        """
        up_to = StateId(state[1], state[0])
        up_to = self.freed[node] = max(up_to, self.freed.get(node, up_to))
        wanted = {*self.seals, *(() if self.pending is None else (self.pending.state,))}
        keep = sorted(StateId(generation, step) for step, generation in wanted)
        return Release(
            node, up_to.generation, up_to.step, self.committed, tuple(s for s in keep if s <= up_to)
        )

    @property
    def wake_at(self) -> float | None:
        return None if self.pending is None or self.pending.uploaded else self.pending.next_due


def known_layouts(specs: Iterable[GenerationSpec]) -> Mapping[GenerationId, Layout]:
    """Layouts of generations and, where their own entry is missing, of those that they resumed from."""
    found: dict[GenerationId, Layout] = {}
    for spec in specs:
        if spec.source.generation is not None and spec.source.layout is not None:
            found.setdefault(spec.source.generation, spec.source.layout)
        found[spec.id] = spec.layout
    return found
