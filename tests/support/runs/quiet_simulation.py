"""A simulated world in which nothing happens by itself: draws are chosen, what is planned is noted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.checks import Checks
from picotron_ray.coordinator.simulator.coverage import Coverage
from picotron_ray.coordinator.simulator.nodes import SimNode, SimWorker
from picotron_ray.coordinator.simulator.world import Sim
from picotron_ray.coordinator.states import MachineState
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import choose_dp, job

A = m.GenerationId(1, 1)
TWO = (m.Member("w1", "n1"), m.Member("w2", "n2"))
SPEC = m.GenerationSpec(A, TWO, Layout(dp=2), m.Source("init"), "start")


class Dice:
    """Draws that are chosen: the middle of a range, the first of a list; ``luck`` for a chance."""

    luck = True

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2

    def random(self) -> float:
        return 0.5

    def chance(self, probability: float) -> bool:
        return self.luck

    def below(self, n: int) -> int:
        return 0

    def pick(self, items: Any) -> Any:
        return items[0]


class Quiet:
    """Two nodes with a ready worker each, and a shell that notes what it hears; ``planned`` is in order."""

    def __init__(self) -> None:
        checks = Checks(Coverage())
        self.sim = Sim(1, job(), choose_dp, checks)
        checks.sim, self.sim.now = self.sim, 100.0
        self.dice: Any = Dice()
        self.sim.rng = self.dice
        self.planned: list[tuple[float, Any]] = []
        self.sim.after = self._after  # type: ignore[method-assign]
        for number in (1, 2):
            node = self.sim.nodes[f"n{number}"] = SimNode(self.sim, f"n{number}", 3)
            worker = node.workers[f"w{number}"] = SimWorker(f"w{number}", node)
            worker.ready = True
        self.heard: list[Any] = []
        memory = SimpleNamespace(term=1, state=MachineState.NEW)
        self.shell: Any = SimpleNamespace(
            deliver=lambda event: self.heard.append(event),
            die=lambda: self.heard.append("died"),
            pause=lambda seconds: self.heard.append(seconds),
            machine=SimpleNamespace(memory=memory),
            newest=SPEC,
            born_at=0.0,
            paused_until=0.0,
            told_seals=set(),
            planner=SimpleNamespace(silent_until=0.0),
        )
        self.sim.shell = self.shell

    def _after(self, delay_s: float, call: Any, *words: Any) -> None:
        self.planned.append((delay_s, getattr(call, "__name__", call), *words))  # type: ignore[arg-type]

    def worker(self, number: int) -> SimWorker:
        return self.sim.nodes[f"n{number}"].workers[f"w{number}"]

    def run(self) -> Any:
        generation = self.sim.generation(SPEC)
        for number in (1, 2):
            self.worker(number).generation = generation
            self.worker(number).last = SPEC.id
        return generation
