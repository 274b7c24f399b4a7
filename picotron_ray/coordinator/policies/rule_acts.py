"""Answers to findings of rules: whether what one asks for is done, and why (not).

Whatever a rule is wrong about, it costs at most ``alerts.act_budget`` answers within an hour. A rewind has
its own limit besides (``elastic.max_rewinds``). A quarantine needs room elsewhere for ``cluster.min_workers``
workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import RuleAct

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class ActView:
    """Facts of the decision.

    Fields:
        obeyed: findings of the last hour on which something was done.
        step: that the finding names.
        may_rewind, rewind_why: what ``policies.rewind`` says of going back.
        node_known: the finding names a node of the run, which is not yet on its way out.
        room_elsewhere: workers that the other nodes have room for.
    """

    act: RuleAct
    obeyed: int
    step: int
    may_rewind: bool = False
    rewind_why: str = ""
    node_known: bool = False
    room_elsewhere: int = 0


def decide(job: JobConfig, view: ActView) -> tuple[bool, str]:
    """Decide whether to do what a finding asks for, and say why (not)."""
    budget = job.alerts.act_budget
    if view.obeyed >= budget:
        return False, f"{view.obeyed} findings were answered within the hour (alerts.act_budget={budget})"
    if view.act == "rewind":
        if view.step >= job.steps:
            return False, "the last step leaves none to recover in"
        return view.may_rewind, view.rewind_why
    if view.act == "quarantine":
        least = job.cluster.min_workers
        if not view.node_known:
            return False, "it names no node that takes part"
        if view.room_elsewhere < least:
            return False, f"other nodes have room for {view.room_elsewhere} workers, min_workers={least}"
    return True, f"answer {view.obeyed + 1} of at most {budget} within an hour"
