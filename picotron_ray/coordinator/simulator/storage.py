"""Simulated storage: one log with conditional appends, uploaded parts, outages, lags and lost replies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.lineage import trimmed
from picotron_ray.coordinator.simulator.slots import SimSlot, StepHistory, complete


class SimLogEntry(NamedTuple):
    """Log entry as written, with the term of its writer."""

    term: int
    kind: str  # term, generation, commit
    spec: m.GenerationSpec | None = None
    generation: m.GenerationId | None = None
    step: int = 0


def digest_of(key: str) -> str:
    """Digest of the manifest of that key."""
    return f"digest of {key}"


@dataclass
class SimStorage:
    """Applies writes at once; the network around it makes them late, fail or lose their replies."""

    log: list[SimLogEntry] = field(default_factory=list)
    parts: dict[tuple[m.GenerationId, int], dict[str, list[SimSlot]]] = field(default_factory=dict)  # by node
    histories: dict[str, StepHistory] = field(default_factory=dict)  # by manifest key
    down_until: float = 0.0
    slow_until: float = 0.0
    hung_until: float = 0.0  # calls are not answered before this time
    mute_until: float = 0.0  # writes happen, their replies are lost
    times: list[float] = field(default_factory=list)  # when each log entry was written
    complaints: list[str] = field(default_factory=list)

    @property
    def term(self) -> int:
        return max((entry.term for entry in self.log), default=0)

    def claim(self) -> int:
        """Begin the next term."""
        self.log.append(SimLogEntry(self.term + 1, "term"))
        return self.log[-1].term

    def digest(self, manifest: str) -> str:
        """Digest of a committed manifest, as the log has it."""
        return digest_of(manifest)

    def damage(self, manifest: str, *, missing: bool) -> None:
        """Damage a manifest, or remove it: to whoever restores from it that is the same."""

    def put(self, node: str, state: tuple[m.GenerationId, int], held: list[SimSlot]) -> None:
        """Take slots of a state; what an earlier upload of the node put there stays."""
        parts = self.parts.setdefault(state, {})
        names = {slot.info.slot for slot in held}
        parts[node] = [slot for slot in parts.get(node, []) if slot.info.slot not in names] + held

    def append_generation(self, term: int, spec: m.GenerationSpec) -> m.Appended:
        return self._append(SimLogEntry(term, "generation", spec, spec.id, spec.resume_step))

    def append_commit(self, term: int, command: m.AppendCommit) -> m.Appended:
        """Append a commit after the checks of a real assembly: the parts are there and cover the whole."""
        key = f"manifests/{command.step}-{command.generation}"
        spec = next(
            (e.spec for e in self.log if e.kind == "generation" and e.generation == command.generation), None
        )
        if spec is None:
            self.complaints.append(
                f"commit of {command.generation} at {command.step} before its generation's entry"
            )
            return self._reply(
                SimLogEntry(term, "commit", None, command.generation, command.step), error="no generation"
            )
        parts = self.parts.get((command.generation, command.step), {})
        held = [slot for node in command.nodes for slot in parts.get(node, [])]
        if not complete([slot.info for slot in held], spec.layout):
            self.complaints.append(
                f"commit of {command.generation} at {command.step} does not cover the state"
            )
            return self._reply(
                SimLogEntry(term, "commit", None, command.generation, command.step), error="incomplete"
            )
        if len({slot.history for slot in held}) != 1:
            self.complaints.append(f"commit of {command.generation} at {command.step} mixes histories")
        self.histories[key] = held[0].history
        return self._append(SimLogEntry(term, "commit", None, command.generation, command.step))

    def _append(self, entry: SimLogEntry) -> m.Appended:
        if entry.term < self.term:
            return self._reply(entry, fenced=True)
        if entry not in self.log:  # the same writer's entry again: its nonce tells
            self.log.append(entry)
        return self._reply(entry, seq=self.log.index(entry) + 1)

    @staticmethod
    def _reply(entry: SimLogEntry, seq: int = 0, error: str = "", fenced: bool = False) -> m.Appended:
        assert entry.generation is not None
        commit = entry.kind == "commit"
        key = f"manifests/{entry.step}-{entry.generation}" if commit and seq else ""
        kind: Literal["commit", "generation"] = "commit" if commit else "generation"
        digest = digest_of(key) if key else ""
        return m.Appended(kind, entry.generation, entry.step, seq, key, error, fenced, digest)

    def commits(self) -> tuple[m.Commit, ...]:
        return tuple(
            m.Commit(entry.step, entry.generation, key, seq, digest_of(key))
            for seq, entry in enumerate(self.log, start=1)
            for key in (f"manifests/{entry.step}-{entry.generation}",)
            if entry.kind == "commit" and entry.generation is not None
        )

    def generations(self) -> tuple[m.GenerationSpec, ...]:
        specs = [entry.spec for entry in self.log if entry.spec is not None]
        return trimmed(specs, {commit.generation for commit in self.commits()})
