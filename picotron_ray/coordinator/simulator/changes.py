"""Changes of a simulated run that adapts: the record of them that a next term reads, and what must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from picotron_ray.config.schema.adapt import AdaptKind
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.adaptation import ADAPT
from picotron_ray.coordinator.policies.adaptation import HOUR_S, REASON
from picotron_ray.coordinator.policies.kept_settings import kinds_of
from picotron_ray.coordinator.simulator.faults import restart
from picotron_ray.coordinator.simulator.world import Sim

KILLED_S = 0.05
"""Longest from a stage of a change to the death of the coordinator that was planned for it."""
STAGES = ("apply", "launched", "kept", "back", "void", "taken back")
"""Stages of a change at which a coordinator may be planned to die: decided, begun, judged, undone."""


class Changes:
    """Changes of a run by what its coordinators told, and what must hold of them."""

    def __init__(self, sim: Sim, kinds: Sequence[AdaptKind]) -> None:
        """
        Args:
            kinds: that are permitted.
        """
        self._sim, self._permitted = sim, set(kinds)
        self._trials: dict[str, tuple[str, str, m.Settings]] = {}  # by the generation that began with it
        self._kept: m.Settings = ()
        self._hurt: set[tuple[str, str]] = set()
        self._judged: m.Judged | None = None
        self._times: list[float] = []
        self.kill_at = ""
        """Stage at which the coordinator dies, once; empty: at none."""
        self.killed = False

    def past(self) -> dict[str, Any]:
        """Fields of a term's first event."""
        ages = tuple(self._sim.now - at for at in self._times if self._sim.now - at < HOUR_S)
        return {"judged": self._judged, "changed_s_ago": ages}

    def told(self, alert: m.Alert) -> None:
        """Hear of a decision."""
        action, began = alert.data.get("action", ""), str(alert.data.get("began", ""))
        if alert.kind != ADAPT:
            return
        if began in self._trials:
            kind, target, settings = self._trials[began]
            term, n = (int(number) for number in began.split("."))
            self._judged = m.Judged(m.GenerationId(term, n), action, alert.data.get("after_s", 0.0))
            if action == "kept":
                self._kept = settings
            elif action == "back":
                self._hurt.add((kind, target))
        self._passed(action)

    def begun(self, command: m.RunGeneration) -> None:
        """Hear of a generation, and hold it against what was told before."""
        spec, say = command.spec, self._sim.violation
        if command.adopt:
            return
        if lost := set(self._kept) - set(spec.settings):
            say(f"generation {spec.id} ({spec.reason}) runs without what was kept: {sorted(lost)}")
        foreign = [key for key, _ in spec.settings if self._permitted.isdisjoint(kinds_of(key))]
        if foreign:
            say(f"generation {spec.id} runs with {foreign}, which nobody permitted")
        newest = spec.adapted[-1] if spec.adapted else None
        if newest is not None and newest.verdict == "trial" and newest.began == spec.id:
            if (newest.kind, newest.target) in self._hurt:
                say(f"generation {spec.id} tries {newest.kind} again, which hurt: {newest.target}")
            self._trials[str(spec.id)] = newest.kind, newest.target, spec.settings
        if spec.reason.startswith(REASON):
            self._times.append(self._sim.now)
            self._passed("launched" if newest and newest.began == spec.id else "taken back")

    def _passed(self, stage: str) -> None:
        if stage == self.kill_at and not self.killed:
            self.killed = True
            self._sim.after(KILLED_S * self._sim.rng.random(), restart, self._sim)
