"""Adaptation at the begin of a term: what earlier ones changed, what came of it, and what holds now."""

from __future__ import annotations

from dataclasses import replace

from picotron_ray.coordinator.adaptation import ADAPT
from picotron_ray.coordinator.adaptation_state import IDLE
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import Begin, Judged
from picotron_ray.coordinator.policies.adaptation import settled
from picotron_ray.coordinator.policies.kept_settings import held_settings


def take_over_changes(memory: MachineMemory, event: Begin) -> None:
    """Take over settings and changes of the newest generation, and the verdict that it does not have yet."""
    memory.calibration = event.calibration
    times = tuple(memory.now - ago_s for ago_s in event.changed_s_ago)
    memory.adaptation = replace(IDLE, calibration=event.calibration, times=times)
    if memory.spec is None:
        return
    memory.settings, memory.adapted = memory.spec.settings, memory.spec.adapted
    if event.judged is not None:
        _apply_verdict(memory, event.judged)
    _drop_settings(memory)


def _apply_verdict(memory: MachineMemory, judged: Judged) -> None:
    assert memory.spec is not None
    trial = memory.adapted[-1] if memory.adapted else None
    if trial is None or trial.verdict != "trial" or (trial.began or memory.spec.id) != judged.began:
        return
    done = replace(trial, verdict=judged.verdict, after_s=judged.after_s)
    if judged.verdict == "void":
        memory.settings = trial.settings
    memory.adapted = (*memory.adapted[:-1], done if judged.verdict == "back" else settled(done))


def _drop_settings(memory: MachineMemory) -> None:
    """Leave out settings that do not hold for the job as it is now."""
    assert memory.spec is not None
    known = memory.spec.replaced, memory.adapted
    memory.settings, dropped = held_settings(memory.job, memory.settings, *known)
    newest = memory.adapted[-1] if memory.adapted else None
    if newest is not None and newest.settings:  # what it is taken back to
        before, _ = held_settings(memory.job, newest.settings, *known)
        memory.adapted = (*memory.adapted[:-1], replace(newest, settings=before))
    for text in dropped:
        said = f"a setting of an earlier launch is not kept: {text}"
        memory.alert("info", ADAPT, said, action="none", step=memory.spec.resume_step)
