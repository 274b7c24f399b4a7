"""Waits that figures do not tell from computing: CUDA, under ZeRO and tensor, context, expert parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.adaptation import NOT_SEEN
from picotron_ray.coordinator.policies.bottleneck import bottlenecks, reduce_s
from tests.support.runs.adaptive_world import AdaptiveWorld, adaptive_job, decisions, plain_figures
from tests.support.runs.coordinator_world import of


def unseen(step_s: float) -> m.RunFigures:
    """A step of one slow rank of four, whose peers wait for it inside their passes."""
    found = plain_figures(step_s, forward=0.3 * step_s, backward=0.65 * step_s, reduce=1e-6)
    return replace(found, replica_rows=(6, 6, 6, 6), waits_seen=False)


def test_what_is_not_measured_is_no_bottleneck() -> None:
    found = unseen(1.0)
    assert bottlenecks(found, [3]) == []
    seen = replace(found, waits_seen=True)
    assert [one.bottleneck for one in bottlenecks(seen, [3])] == ["replica", "compute"]
    waits = replace(found, phase_s={"reduce": 0.9})
    assert (bottlenecks(waits), reduce_s(waits)) == ([], 0.0)


def test_nothing_is_changed_for_waits_that_are_not_seen_and_it_is_said_once() -> None:
    there = AdaptiveWorld(adaptive_job("rows", "micro-batch", "layout"), lambda spec, step: unseen(1.0))
    there.start(("a", 4))
    out = [command for _ in range(6) for command in there.report()]
    assert decisions(out) == []
    told = [alert.text for alert in of(out, m.Alert) if alert.kind == "adapt"]
    assert told == [f"nothing is changed: {NOT_SEEN}"]


def calibration(figures: Any) -> tuple[float, float, float]:
    """Factors that figures give, and seconds of the estimate that they are compared with."""
    estimates: list[float] = []

    def told(spec: m.GenerationSpec, step: int) -> m.RunFigures:
        memory = there.machine.memory
        members = memory.living_members()
        cost_s, reduces_s = memory.plans.cost(spec.layout, memory.question(members, len(members)))
        assert cost_s > reduces_s > 0
        estimates.append(cost_s)
        return figures(cost_s, reduces_s)

    there = AdaptiveWorld(adaptive_job("layout", layout__zero=0), told)
    there.start(("a", 4))
    for _ in range(3):
        there.report()
    factors = there.machine.memory.adaptation.calibration
    return factors.compute, factors.communication, estimates[0]


def test_a_sum_that_hid_elsewhere_does_not_make_links_fast() -> None:
    """Twice the estimate in all; of the sums a thousandth is seen: because it hid, or the clock is blind."""
    for seen in (True, False):

        def hidden(cost_s: float, reduces_s: float, seen: bool = seen) -> m.RunFigures:
            found = plain_figures(2 * cost_s, reduce=1e-3 * reduces_s, backward=cost_s)
            return replace(found, waits_seen=seen)

        compute, links, _ = calibration(hidden)
        assert (compute, links) == (2.0, 2.0)


def test_a_sum_that_is_seen_has_its_own_factor() -> None:
    def slow_links(cost_s: float, reduces_s: float) -> m.RunFigures:
        return plain_figures(cost_s + 3 * reduces_s, reduce=4 * reduces_s, backward=0.5 * cost_s)

    assert calibration(slow_links)[:2] == (1.0, 4.0)
