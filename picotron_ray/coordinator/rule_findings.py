"""Findings of rules over telemetry: the most urgent one is answered at the next boundary, or dropped.

A rule sees and asks; it decides nothing. What it asks for has a row in the one table
(``policies.precedence``): a generation that already ends for something else drops it. Whatever is not done is
asked again if it is still true, in the next generation and, ever more seldom, in this one
(``observability.alerts.book``).
"""

from __future__ import annotations

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.drains import notice, save
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.policies import rewind, rule_acts
from picotron_ray.coordinator.policies.precedence import concern_of_act
from picotron_ray.coordinator.policies.rewind import BY_RULE, BadStep
from picotron_ray.coordinator.policies.rule_acts import HOUR_S, ActView
from picotron_ray.coordinator.resume_state import rewinds_before
from picotron_ray.coordinator.states import MachineState

RULE_ACT = "rule-act"
"""Kind of the alerts that tell answers."""


def rule_finding(memory: MachineMemory, event: m.RuleFinding) -> None:
    """Keep a finding until it is answered; of several the most urgent, of equals the first."""
    if memory.spec is None or event.generation != memory.spec.id:
        _tell(memory, event, False, f"generation {event.generation} is over")
    elif memory.state is not MachineState.RUNNING:
        _tell(memory, event, False, f"generation {event.generation} ends already ({memory.reason})")
    elif (held := memory.rule_found) is None:
        memory.rule_found = event
    else:
        first = concern_of_act(event.act) < concern_of_act(held.act)
        memory.rule_found, other = (event, held) if first else (held, event)
        _tell(memory, other, False, "a more urgent finding is answered first")


def obey_rule(memory: MachineMemory) -> str | None:
    """Do what the kept finding asks for; returns the reason to leave the generation where that is needed."""
    found = memory.rule_found
    if found is None or not memory.progressed:
        return None
    memory.rule_found = None
    bad = BadStep(found.step, f"{BY_RULE}{found.rule}", found.text)
    memory.rules_obeyed = tuple(at for at in memory.rules_obeyed if memory.now - at < HOUR_S)
    obey, why = rule_acts.decide(memory.job, _view(memory, found, bad))
    _tell(memory, found, obey, why)
    if not obey:
        return None
    memory.rules_obeyed = (*memory.rules_obeyed, memory.now)
    if found.act == "rewind":
        memory.bad = bad
        return f"rule {found.rule} asks to go back: {found.text}"
    if found.act == "quarantine":
        notice(memory, m.DrainNotice(found.node, 0.0))
    else:
        save(memory)
    return None


def _view(memory: MachineMemory, found: m.RuleFinding, bad: BadStep) -> ActView:
    may_rewind, why = False, ""
    if found.act == "rewind":
        may_rewind, why = rewind.decide(memory.job, bad, rewinds_before(memory))
    nodes = memory.roster.nodes
    node = nodes.get(found.node)
    others = [each for each in nodes.values() if each is not node and not each.draining and not each.barred]
    return ActView(
        act=found.act,
        obeyed=len(memory.rules_obeyed),
        step=found.step,
        may_rewind=may_rewind,
        rewind_why=why,
        node_known=node is not None and not node.draining,
        room_elsewhere=sum(each.capacity for each in others),
    )


def _tell(memory: MachineMemory, found: m.RuleFinding, obeyed: bool, why: str) -> None:
    asked = f"rule {found.rule} asks for {found.act}"
    if found.node:
        asked += f" of node {found.node}"
    text = f"{asked}: {'done' if obeyed else 'not done'}, {why}"
    level = "warning" if obeyed else "info"
    data = {"rule": found.rule, "act": found.act, "done": obeyed, "step": found.step, "why": why}
    memory.alert(level, RULE_ACT, text, **data)  # type: ignore[arg-type]
