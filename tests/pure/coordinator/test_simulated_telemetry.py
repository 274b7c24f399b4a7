"""Telemetry of simulated runs: the machine gets it, and drops that of generations that are over."""

from __future__ import annotations

import pytest

from picotron_ray.config.schema.telemetry import STEP_PHASES
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.simulator.run import simulate
from picotron_ray.coordinator.simulator.shell import Shell
from picotron_ray.coordinator.simulator.telemetry import EVERY, is_told, measured
from picotron_ray.layout.layout import Layout
from tests.support.runs.coordinator_world import job


def test_figures_are_of_the_layout_and_add_up() -> None:
    layout = Layout(dp=2, pp=2)
    members = tuple(m.Member(f"w{rank}", "n1") for rank in range(4))
    spec = m.GenerationSpec(m.GenerationId(1, 1), members, layout, m.Source("init", 30), "")
    assert [step for step in range(31, 80) if is_told(spec, step)] == [30 + EVERY, 30 + 2 * EVERY]
    figures = measured(job(), spec, 50, 0.5).figures
    assert tuple(figures.phase_s) == STEP_PHASES
    assert sum(figures.phase_s.values()) == pytest.approx(0.5)
    assert (len(figures.replica_row_s), sum(figures.replica_rows)) == (2, job().data.global_batch)
    assert len(figures.stage_s) == 2


def test_the_machine_keeps_the_newest_of_the_running_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    deliver = Shell.deliver

    def noted(shell: Shell, event: m.Event) -> None:
        deliver(shell, event)
        if isinstance(event, m.Measured):
            memory = shell.machine.memory
            runs = memory.spec is not None and memory.spec.id == event.generation
            told.append(memory.figures is event)
            assert (
                told[-1] or not runs or not shell.alive or shell.sim.now < shell.paused_until or shell.ending
            )

    monkeypatch.setattr(Shell, "deliver", noted)
    for seed in range(40):
        assert simulate(seed).failures == ()
    assert told.count(True) > 20
    assert told.count(False) > 0, "some come too late"
