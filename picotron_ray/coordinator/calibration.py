"""Telling how long the running generation's steps take, against the planner's estimate."""

from __future__ import annotations

from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.policies.calibration import StepWindow, drifted, ratio_of
from picotron_ray.coordinator.policies.pace import measured_until
from picotron_ray.planner.calibration import NONE

CALIBRATION = "calibration"
"""Kind of the alerts that tell a generation's steps against their estimate."""


def calibrate(memory: MachineMemory) -> None:
    """Measure the running generation's steps, tell them once, and warn of a drift."""
    spec, window = memory.spec, memory.window
    if spec is None or not memory.progressed or memory.debugged:
        return
    generation, now = (spec.id.term, spec.id.n), measured_until(memory.now, memory.hold)
    if window is None or window.generation != generation:
        memory.window = StepWindow(generation, memory.seen_step, now)
        return
    measured_s = window.measured_s(memory.seen_step, now)
    if measured_s is None:
        return
    if window.warms_up:
        memory.window = window.after(memory.seen_step, now, 0.0)
        return
    members = memory.living_members()
    estimated_s = memory.plans.cost_s(spec.layout, memory.question(members, len(members)))
    ratio = ratio_of(measured_s, estimated_s)
    if ratio is None:
        return
    if not window.ratio or drifted(window.ratio, ratio):
        _tell(memory, measured_s, estimated_s, window.ratio)
    memory.window = window.after(memory.seen_step, now, ratio)


def _tell(memory: MachineMemory, measured_s: float, estimated_s: float, before: float) -> None:
    assert memory.spec is not None
    layout, ratio = str(memory.spec.layout), measured_s / estimated_s
    text = (
        f"a step takes {measured_s:.3g} s, {ratio:.3g} times the estimate of {estimated_s:.3g} s for {layout}"
    )
    if before:
        text += f"; before it was {before:.3g} times"
    if before and ratio > before:
        text += ": look for a slow device, link or source of data"
    if memory.calibration != NONE:
        text += f"; the estimate is corrected by {memory.calibration}"
    figures = {"predicted_s": estimated_s, "measured_s": measured_s, "ratio": ratio}
    level = "warning" if before and ratio > before else "info"
    memory.alert(level, CALIBRATION, text, layout=layout, step=memory.seen_step, **figures)  # type: ignore[arg-type]
