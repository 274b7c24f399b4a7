"""Coverage: transitions that were seen while faults were at work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from picotron_ray.coordinator.states import TRANSITIONS, MachineState

Pair = tuple[MachineState, MachineState]
ALL_PAIRS: tuple[Pair, ...] = tuple((a, b) for a in MachineState for b in sorted(TRANSITIONS[a]))


@dataclass
class Coverage:
    """Counts of (transition, fault); ``active`` is set by the run: name of each fault at work."""

    counts: Counter[tuple[Pair, str]] = field(default_factory=Counter)
    active: set[str] = field(default_factory=set)

    def note(self, pair: Pair) -> None:
        for name in self.active or ("none",):
            self.counts[pair, name] += 1

    def add(self, other: Coverage) -> None:
        self.counts.update(other.counts)

    def unseen(self) -> list[Pair]:
        """Transitions of the table that no fault led to."""
        seen = {pair for pair, _ in self.counts}
        return [pair for pair in ALL_PAIRS if pair not in seen]

    def table(self, faults: list[str]) -> str:
        """Format one line per transition, one column per fault."""
        names = ["none", *faults]
        width = max(len(name) for name in names) + 1
        lines = [" " * 24 + "".join(f"{name:>{width}}" for name in names)]
        for pair in ALL_PAIRS:
            cells = "".join(f"{self.counts[pair, name] or '.':>{width}}" for name in names)
            lines.append(f"{pair[0] + ' > ' + pair[1]:<24}" + cells)
        return "\n".join(lines)
