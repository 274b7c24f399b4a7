"""Figures that mislead the adaptation loop: windows with old steps in them, and waits for slow replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.policies.bottleneck import bottlenecks
from tests.support.runs.adaptive_world import AdaptiveWorld, adaptive_job, decisions, plain_figures
from tests.support.runs.coordinator_world import of

STAGES: dict[str, Any] = {
    "model__layers": 8,
    "cluster__max_workers": 2,
    "layout__pp": 2,
    "layout__dp": 1,
    "layout__tp": 1,
    "layout__micro_batch": 4,
}


def pipeline(shares: tuple[float, float], blocks: tuple[int, int]) -> m.RunFigures:
    """A step of two stages whose blocks take these seconds, by 6 micro-batches."""
    stage_s = (shares[0] * blocks[0], shares[1] * blocks[1])
    seconds = 7 * max(stage_s)
    found = plain_figures(seconds, forward=0.3 * seconds, backward=0.4 * seconds, bubble=0.25 * seconds)
    return replace(found, stage_s=stage_s)


def test_a_window_that_is_half_old_is_not_decided_on() -> None:
    """A stage becomes slow; the first windows hold steps from before it, whose seconds promise too little.

    A change that is measured against them would be taken back although it helps.
    """
    old = iter([0.0, 0.0, 0.45, 0.8])

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        blocks = spec.layout.stage_blocks or (4, 4)
        slow = 0.03 * (next(old, 1.0) if spec.id.n == 1 else 1.0)
        return pipeline((0.01, max(0.01, slow)), (blocks[0], blocks[1]))

    there = AdaptiveWorld(adaptive_job("stages", **STAGES), figures)
    there.start(("a", 2))
    out = [command for _ in range(8) for command in there.report()]
    assert decisions(out) == [("apply", "stages"), ("kept", "stages")]
    assert there.spec.layout.stage_blocks == (6, 2)


def test_figures_that_never_settle_are_decided_on_in_the_end() -> None:
    turn = iter(range(1000))

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        blocks = spec.layout.stage_blocks or (4, 4)
        noise = (1.0, 1.3)[next(turn) % 2]
        return pipeline((0.01 * noise, 0.03 * noise), (blocks[0], blocks[1]))

    there = AdaptiveWorld(adaptive_job("stages", **STAGES), figures)
    there.start(("a", 2))
    out = [command for _ in range(8) for command in there.report()]
    assert ("apply", "stages") in decisions(out)


def test_waiting_for_a_slow_replica_is_no_want_of_communication() -> None:
    """Three of four replicas wait for the fourth in the sum of gradients: links are not what is slow."""
    found = plain_figures(1.8, forward=0.3, backward=0.6, reduce=0.9)
    slow = replace(found, replica_row_s=(0.1, 0.3, 0.1, 0.1), replica_rows=(6, 6, 6, 6))
    assert "communication" not in [one.bottleneck for one in bottlenecks(slow)]
    even = replace(slow, replica_row_s=(0.1, 0.1, 0.1, 0.1))
    assert "communication" in [one.bottleneck for one in bottlenecks(even)]


def test_why_nothing_is_changed_is_told_once_however_its_figures_move() -> None:
    """Seen: a line each second, since what a change would save was now 0.1 % and now nothing."""
    turn = iter(range(1000))

    def figures(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        seconds = 1.0 + 0.02 * (next(turn) % 3)
        return pipeline((0.01 * seconds, 0.01 * seconds), (4, 4))

    there = AdaptiveWorld(adaptive_job("bucket", "stages", **STAGES), figures)
    there.start(("a", 2))
    there.figures = lambda spec, step: replace(
        figures(spec, step), phase_s={"bubble": 0.4 * (1 + 0.1 * (step % 7))}
    )
    out = [command for _ in range(30) for command in there.report()]
    told = [alert for alert in of(out, m.Alert) if alert.kind == "adapt"]
    assert len(told) <= 2
    assert told
