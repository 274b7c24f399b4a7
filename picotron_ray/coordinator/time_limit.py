"""Time limit of a launch: the run is stopped with a commit while there is just time enough for it."""

from __future__ import annotations

from picotron_ray.coordinator.generation_stop import SETTLE_FACTOR
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.policies.time_limit import LimitView, decide

ABORTS = 2.0  # x the time for an answer: members are torn out, then killed
LIMIT = "limit"  # kind of the alert that tells why the run stops
DEADLINE = "cluster.deadline"


def watch_limit(memory: MachineMemory) -> None:
    """Stop the run where its time runs out, to be launched again unless by a deadline.

    An earlier stop goes first.
    """
    if memory.ends_at is None or memory.stop_requested:
        return
    members = len(memory.spec.members) if memory.spec is not None and memory.in_generation else 0
    view = LimitView(
        left_s=memory.ends_at - memory.now - memory.slept_s,
        limit_s=memory.limit_s,
        step_s=memory.step_s if memory.in_generation else 0.0,
        flush_s=memory.flush_s,
        stuck_s=(SETTLE_FACTOR + ABORTS) * memory.answer_s(members),
        commit_s=memory.commit_s,
    )
    stop, why = decide(view)
    if stop:
        # a launch again, word for word, would be refused by a deadline that has passed
        memory.stop_requested, memory.again = True, memory.limit != DEADLINE
        text = f"{memory.limit} ends this launch in {view.left_s:.0f} s: stopping with a commit, {why}"
        memory.alert("warning", LIMIT, text, left_s=view.left_s, key=memory.limit)
