"""A hand-driven cluster whose steps take what a test says, for the adaptation loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.states import MachineState
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.default_layout import default_planner
from picotron_ray.planner.search import planner
from tests.support.runs.coordinator_world import World, job, of, outcomes, snapshot

STEPS = 60
"""Between two reports of figures."""


def adaptive_job(*kinds: str, **changes: Any) -> JobConfig:
    """A job of many steps whose loop looks every second and may apply these kinds."""
    plain = {"steps": 100_000, "elastic__node_timeout_s": 9999.0, "cluster__device": "cpu"}
    loop = {"adapt__apply": kinds, "adapt__interval_s": 1.0, "adapt__budget": 50}
    return job(**{**plain, **loop, **changes})


class AdaptiveWorld(World):
    """Trains in reports: each one passes ``STEPS`` steps and tells what they took."""

    def __init__(self, config: JobConfig, figures: Callable[[m.GenerationSpec, int], m.RunFigures]) -> None:
        super().__init__(config, planner(config, "cpu"), default_planner(config, "cpu"))
        self.figures, self.step, self.changes = figures, 0, 0

    def start(self, *nodes: tuple[str, int]) -> m.GenerationSpec:
        self.up(*nodes or (("a", 4),))
        self.trains(self.spec.resume_step + 1)
        return self.spec

    def trains(self, step: int) -> list[m.Command]:
        self.step = step
        workers = {member.worker: step for member in self.spec.members}
        nodes = dict.fromkeys(member.node for member in self.spec.members)
        here = {n: {w.worker: step for w in self.spec.members if w.node == n} for n in nodes}
        assert workers
        return self.send(*(m.Heartbeat(n, self.spec.id, here[n], self.others(n)) for n in nodes))

    def others(self, node: str) -> tuple[str, ...]:
        members = {member.worker for member in self.spec.members}
        return tuple(name for name in self.living(node) if name not in members)

    def report(self, seconds: float = 20.0) -> list[m.Command]:
        """Time passes, steps are done, figures come; a generation that is left is replaced."""
        out: list[m.Command] = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.9)
            out += self.trains(self.step) + self.send(m.Tick())
        out += self.trains(self.step + STEPS)
        found = replace(self.figures(self.spec, self.step), last_step=self.step)
        out += self.send(m.Measured(self.spec.id, found))
        return out + self.remesh(out)

    def remesh(self, commands: list[m.Command]) -> list[m.Command]:
        """Let all members leave where they are asked to, and the next generation train."""
        if self.state is not MachineState.LEAVING:
            return []
        spec = self.spec
        out = self.send(*outcomes(spec, "interrupted", self.step))
        out += self.answer(out, snapshot(spec, self.step))
        assert of(out, m.RunGeneration), self.state
        self.changes += 1
        return out + self.trains(self.step + 1)


def decisions(commands: list[m.Command]) -> list[tuple[str, str]]:
    """Action and kind of every change that was told of."""
    told = [a for a in of(commands, m.Alert) if a.kind == "adapt" and a.data["action"] != "none"]
    return [(alert.data["action"], alert.data.get("change", "")) for alert in told]


def plain_figures(step_s: float, **phases: float) -> m.RunFigures:
    """Figures of an undisturbed step; what the phases leave is other."""
    rest = max(0.0, step_s - sum(phases.values()))
    return m.RunFigures(STEPS, 0, step_s, {**phases, "other": rest})


def even_rows(layout: Layout, batch: int) -> tuple[int, ...]:
    spans = (layout.rows(at, batch) for at in range(layout.dp))
    return tuple(end - start for start, end in spans)
