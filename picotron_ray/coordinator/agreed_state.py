"""State to go on from where replicas differ, and what the next generation finds out (`replica_check`)."""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.policies.restore_point import older_state
from picotron_ray.coordinator.resume_state import held_slots
from picotron_ray.layout.layout import Layout

REPLICAS = "replicas"
"""Kind of the alerts that tell of replicas that differ."""


def agreed_state(memory: MachineMemory) -> tuple[m.Source, str] | None:
    """Newest state that is not younger than what replicas agreed on; None: nothing younger is in doubt."""
    found = memory.divergence
    if found is None or found.settled:
        return None
    point, why = older_state(
        () if memory.distrust_slots else held_slots(memory),
        memory.layouts,
        memory.commits,
        memory.history,
        wanted=found.agreed_step,
        below=found.agreed_step + 1,
        bad_manifests=memory.bad_manifests,
    )
    return point, f"{why}: replicas agreed after step {found.agreed_step}"


def replay_by(
    memory: MachineMemory, point: m.Source, members: tuple[m.Member, ...], layout: Layout
) -> m.StepReplay | None:
    """Return what the next generation finds out by computing steps again; None: nothing.

    Only the same ranks can compute again what they computed. A generation that leaves before it is through
    hands it on.
    """
    found, before = memory.divergence, memory.spec
    asked = found.replay if found is not None else None if before is None else before.replay
    if asked is None or before is None or point.step >= asked.step:
        return None
    if (members, layout) == (before.members, before.layout):
        return asked
    text = (
        f"replicas differed after step {asked.step}, and who was wrong cannot be decided: the ranks that"
        " computed it are no longer together"
    )
    memory.alert("error", REPLICAS, text, step=asked.step, decided=False)
    return None
