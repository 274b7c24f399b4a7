"""Adaptation loop: figures of the running generation become a change at a boundary, which is then judged.

    figures → bottlenecks → suggestions → their gain by the calibrated cost model → the best one that is
    permitted and pays → a new generation → its figures → kept, or taken back

Figures and findings of others only say what is slow. It is the least urgent concern
(``policies.precedence``): nothing is looked at unless a generation trains undisturbed, and a failure before
its judgement takes a change back (``adaptation_launch``). The planner's answers are awaited; nothing here
searches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from picotron_ray.coordinator.adaptation_offers import answered, awaits, question_of, suggested
from picotron_ray.coordinator.adaptation_state import AdaptState, Change
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import Adapted, Measured, RunFigures
from picotron_ray.coordinator.messages.figures import Bottleneck
from picotron_ray.coordinator.policies.adaptation import (
    FOR_MEMORY,
    REASON,
    Offer,
    began_of,
    judge,
    left_in_hour,
    owed,
    pays,
    ranked,
    settled,
    waits_until,
)
from picotron_ray.coordinator.policies.bottleneck import (
    Found,
    bottlenecks,
    memory_is_short,
    own_s,
    reduce_s,
    slow_replicas,
)
from picotron_ray.planner.calibration import Calibration, bounded

ADAPT = "adapt"
"""Kind of the alerts that tell decisions."""
PATIENCE_S = 60.0
"""Longest wait for the planner's answers to suggestions."""
SLOW_STEPS = 50
"""Steps for which a replica must be slow before it is fed less."""
UNSTEADY, MOST_UNSTEADY = 0.1, 3
"""Change of a step's seconds from one look to the next above which figures hold old steps still, and looks in
a row that are passed over for it."""
MOST_TOLD = 32
"""Reasons for no change that are remembered of a generation."""
NOT_SEEN = (
    "on this device passes wait for other ranks unseen at this layout, so slow replicas are not measured"
)
"""Why nothing is done where all that was measured is in order."""
NOTICED = 1.1
"""Factor by which a calibration must change before the planner is asked by the new one."""


def adapt(memory: MachineMemory) -> str | None:
    """Look at new figures; returns the reason to leave the generation where a change is to be made."""
    if (hurt := owed(memory.adapted)) is not None and _undisturbed(memory):
        return _take_back(memory, hurt, "as the coordinator of the term before has judged")
    state, measured = memory.adaptation, memory.figures
    if measured is None or not _may_look(memory, state, measured):
        return None
    figures = measured.figures
    asked = state.asked
    if asked is None:
        state = _seen(memory, state, measured)
        trial = memory.adapted[-1] if memory.adapted else None
        if trial is not None and trial.verdict == "trial":
            return _judged(memory, trial)
        if 0 < state.unsteady <= MOST_UNSTEADY and not memory_is_short(figures):
            return None
        slow = slow_enough(state, figures)
        asked = suggested(memory, figures, [*bottlenecks(figures, slow), *_told(state)], slow)
    elif asked.plans == memory.plans.known and memory.now - asked.at < PATIENCE_S:
        return None
    if awaits(memory, asked) and memory.now - asked.at < PATIENCE_S:
        memory.adaptation = replace(state, asked=replace(asked, plans=memory.plans.known))
        return None
    later = tuple(one for one in state.findings if one not in asked.reports)
    memory.adaptation = replace(state, asked=None, findings=later)
    return _chosen(memory, asked.figures, list(asked.found), answered(memory, asked))


def _may_look(memory: MachineMemory, state: AdaptState, measured: Measured) -> bool:
    """Whether there is something new to look at, and nothing more urgent."""
    spec, config = memory.spec, memory.job.adapt
    if not config.apply or spec is None or measured.generation != spec.id:
        return False
    if not _undisturbed(memory):
        return False
    if state.asked is not None:
        return True
    new = (measured.generation, measured.figures.last_step) != state.looked
    return new and measured.figures.steps > 0 and memory.now - state.looked_at >= config.interval_s


def _undisturbed(memory: MachineMemory) -> bool:
    return memory.progressed and memory.cap is None and not memory.roster.leaving


def _seen(memory: MachineMemory, state: AdaptState, measured: Measured) -> AdaptState:
    """Note that figures were looked at: which replicas are slow, and how far the cost model is off."""
    figures = measured.figures
    since_looked = state.looked is not None and state.looked[0] == measured.generation
    since = dict(state.slow) if since_looked else {}
    assert memory.spec is not None
    before = state.looked[1] if since_looked and state.looked else memory.spec.resume_step
    new = max(0, min(figures.steps, figures.last_step - before))
    measured_before, measured_s = (state.measured, state.measured_s) if since_looked else (0, 0.0)
    first = figures.last_step - figures.steps
    slow = tuple((at, since.get(at, first)) for at in slow_replicas(figures.replica_row_s))
    steady = not state.looked_s or not since_looked or abs(figures.step_s / state.looked_s - 1) <= UNSTEADY
    memory.adaptation = state = replace(
        state,
        looked_s=figures.step_s,
        unsteady=0 if steady else state.unsteady + 1,
        looked=(measured.generation, figures.last_step),
        looked_at=memory.now,
        slow=slow,
        measured=measured_before + new,
        measured_s=measured_s + new * own_s(figures),
        calibration=_calibration(memory, state.calibration, figures),
    )
    return state


def slow_enough(state: AdaptState, figures: RunFigures) -> list[int]:
    """Replicas that have been slow for long enough."""
    return [at for at, since in state.slow if figures.last_step - since >= SLOW_STEPS]


def _told(state: AdaptState) -> Iterator[Found]:
    for finding in state.findings:
        yield Found(finding.bottleneck, f"{finding.text} ({finding.source})")


def _calibration(memory: MachineMemory, before: Calibration, figures: RunFigures) -> Calibration:
    """Factors by which this generation's steps exceed their estimate, where that has changed clearly.

    The exposed reduction of gradients is told apart where it was measured and the links that it speaks of
    may exist; else both factors change alike. What waits for data, copies and other ranks counts for neither.
    """
    assert memory.spec is not None
    question = question_of(memory, before)
    estimated_s, estimated_reduce_s = memory.plans.cost(memory.spec.layout, question)
    measured = reduce_s(figures)
    waits = sum(figures.phase_s.get(phase, 0.0) for phase in ("data", "snapshot", "sync"))
    spent, by_estimate = figures.step_s - waits, estimated_s - estimated_reduce_s
    if not (0 < by_estimate < float("inf")) or spent <= measured:
        return before
    compute, links = (spent - measured) / by_estimate, 0.0
    if measured > 0 < estimated_reduce_s:
        links = measured / estimated_reduce_s
    if not _times(before, compute, links).believed:
        compute = links = spent / estimated_s
    if all(1 / NOTICED <= change <= NOTICED for change in (compute, links)):
        return before
    found = _times(before, compute, links)
    return replace(found, compute=bounded(found.compute), communication=bounded(found.communication))


def _times(before: Calibration, compute: float, links: float) -> Calibration:
    return replace(before, compute=before.compute * compute, communication=before.communication * links)


# --- what is done -----------------------------------------------------------------------------------


def _chosen(
    memory: MachineMemory, figures: RunFigures, found: list[Found], offers: list[Offer]
) -> str | None:
    """Set the best change that pays; tells why, or once why there is none."""
    assert memory.spec is not None
    config, known = memory.job.adapt, memory.adapted
    if not found:
        if not figures.waits_seen:
            _tell_once(memory, NOT_SEEN, [], NOT_SEEN)
        return None
    seen = "; ".join(one.text for one in found)
    left = left_in_hour(memory.adaptation.times, memory.now, config.budget)
    steps_left, why = memory.job.steps - memory.seen_step, "nothing that is permitted would help"
    for offer in ranked(offers, known):
        if not pays(offer, figures.step_s, steps_left, config.hysteresis):
            why = f"{offer.kind} would save {100 * offer.gain:.1f} % of a step, too little"
            if offer.gain > config.hysteresis:
                why += f" for the {steps_left} steps that are left"
            break
        if left <= 0:
            why = f"adapt.budget={config.budget} changes were made within the hour"
            break
        if memory.now < waits_until(offer.kind, known, memory.launched_at, config):
            why = f"the last change of {offer.kind} was made too short a time ago"
            continue
        return _leave_for(memory, figures, offer, seen)
    _tell_once(memory, f"{seen}: {why}", [one.bottleneck for one in found], why)
    return None


def _leave_for(memory: MachineMemory, figures: RunFigures, offer: Offer, seen: str) -> str:
    suggestion, strike = offer.suggestion, offer.suggestion.strike
    target = f"{FOR_MEMORY if strike else ''}{offer.target}"
    before_s = own_s(figures)
    record = Adapted(offer.kind, target, "trial", offer.gain, before_s, avoid=suggestion.avoid)
    reason = f"{REASON}{offer.kind} for {seen}: {offer.layout}"
    memory.adaptation = replace(
        memory.adaptation,
        change=Change(record, offer.layout, suggestion.settings, strike, reason),
    )
    text = f"{offer.kind}: {offer.target} is to save {100 * offer.gain:.1f} % of a step, for {seen}"
    data = {"action": "apply", "change": offer.kind, "target": target, "gain": offer.gain, "why": seen}
    memory.alert("info", ADAPT, text, **data, before_s=before_s, step=memory.seen_step)
    return reason


def _judged(memory: MachineMemory, trial: Adapted) -> str | None:
    """Keep the change under trial, or leave to take it back."""
    state = memory.adaptation
    after_s = state.measured_s / state.measured if state.measured else 0.0
    verdict, said = judge(trial, after_s, state.measured, memory.job.adapt)
    if verdict == "wait":
        return None
    done = replace(trial, verdict=verdict, after_s=after_s)
    text = f"{trial.kind} is {'kept' if verdict == 'kept' else 'taken back'}: {said}"
    data: dict[str, object] = {"action": verdict, "change": trial.kind, "target": trial.target}
    data["gain"] = trial.expected
    level = "info" if verdict == "kept" else "warning"
    data |= {"began": began_of(trial), "before_s": trial.before_s, "after_s": after_s}
    memory.alert(level, ADAPT, text, **data, step=memory.seen_step)  # type: ignore[arg-type]
    if verdict == "kept" or trial.layout is None:
        memory.adapted = (*memory.adapted[:-1], settled(done))
        return None
    memory.adapted = (*memory.adapted[:-1], done)
    return _take_back(memory, done, said)


def _take_back(memory: MachineMemory, hurt: Adapted, why: str) -> str:
    """Set the layout and settings of before a change, for the next generation."""
    assert hurt.layout is not None
    reason = f"{REASON}{hurt.kind} is taken back: {why}"
    change = Change(settled(hurt), hurt.layout, hurt.settings, None, reason)
    memory.adaptation = replace(memory.adaptation, change=change)
    return reason


def _tell_once(memory: MachineMemory, text: str, found: list[Bottleneck], why: str) -> None:
    """Tell why nothing is changed, where the same was not told of this generation, whatever the figures."""
    assert memory.spec is not None
    of = f"{memory.spec.id} "
    key = f"{of}{', '.join(dict.fromkeys(found))}: {''.join(c for c in why if c not in '-.0123456789')}"
    told = tuple(one for one in memory.adaptation.told if one.startswith(of))
    if key not in told:
        memory.adaptation = replace(memory.adaptation, told=(*told[-MOST_TOLD:], key))
        memory.alert("info", ADAPT, f"nothing is changed: {text}", action="none", step=memory.seen_step)
