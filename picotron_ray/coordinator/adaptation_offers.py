"""Offers of the adaptation loop: changes that may help, with what they promise by the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from picotron_ray.config.settings import with_settings
from picotron_ray.config.validation.layout import layout_problems
from picotron_ray.coordinator.adaptation_state import Asked
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import LayoutQuestion, RunFigures
from picotron_ray.coordinator.plan_book import ReadyPlan
from picotron_ray.coordinator.policies.adaptation import Offer, avoided
from picotron_ray.coordinator.policies.balance import (
    is_uneven,
    known_row_s,
    reshared,
    rows_factor,
    rows_suggestion,
    slowness,
    stages_suggestion,
)
from picotron_ray.coordinator.policies.bottleneck import ANSWERS, Found
from picotron_ray.coordinator.policies.suggestions import RELEASED, Scene, Suggestion, settings_suggestions
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.calibration import Calibration
from picotron_ray.planner.memory import memory_estimate


def question_of(memory: MachineMemory, calibration: Calibration) -> LayoutQuestion:
    """The planner's question for the members as they are."""
    members = memory.living_members()
    return replace(memory.question(members, len(members)), calibration=calibration)


def suggested(
    memory: MachineMemory, figures: RunFigures, found: Sequence[Found], slow: Sequence[int]
) -> Asked:
    """Look for changes that answer bottlenecks; it takes long where there are many replicas.

    Args:
        slow: replicas that have been slow for long enough.
    """
    question = question_of(memory, memory.adaptation.calibration)
    suggestions = tuple(_suggestions(memory, figures, question, found, slow))
    reports = memory.adaptation.findings
    return Asked(memory.now, memory.plans.known, figures, tuple(found), suggestions, question, reports)


def awaits(memory: MachineMemory, asked: Asked) -> bool:
    """Whether the planner has yet to answer a question of these, which are put to it."""
    questions = [one.question for one in asked.suggestions if one.question is not None]
    open_ = [question for question in questions if not memory.plans.look_up(question)]
    return any(question not in memory.plans.failed for question in open_)


def answered(memory: MachineMemory, asked: Asked) -> list[Offer]:
    """Offers of those suggestions whose questions are answered."""
    ready = [one for one in asked.suggestions if one.question is None or one.question in memory.plans.answers]
    offers = [_offer(memory, suggestion, asked) for suggestion in ready]
    return [offer for offer in offers if offer is not None]


def _suggestions(
    memory: MachineMemory,
    figures: RunFigures,
    question: LayoutQuestion,
    found: Sequence[Found],
    slow: Sequence[int],
) -> Iterator[Suggestion]:
    assert memory.spec is not None
    job, layout, apply = memory.job, memory.spec.layout, memory.job.adapt.apply
    gpus = any(node.has_gpus for node in memory.roster.nodes.values())
    estimate = memory_estimate(with_settings(job, memory.settings), layout).total_bytes
    passed_over = avoided(memory.adapted, memory.roster.workers)
    spares = [worker for worker in memory.roster.usable() if worker.name not in passed_over]
    everyone = None
    if spares:
        asked = memory.question([*memory.living_members(), *spares], job.cluster.max_workers)
        everyone = replace(asked, calibration=question.calibration)
    scene = Scene(job, layout, memory.settings, figures, question, estimate, gpus, len(spares), everyone)
    wanted = list(dict.fromkeys(kind for one in found for kind in ANSWERS[one.bottleneck] if kind in apply))
    by_settings = [kind for kind in wanted if kind not in ("rows", "stages")]
    if any(one.bottleneck == "memory" for one in found):  # nothing is tried that may take more of it
        kinds = [kind for kind in ANSWERS["memory"] if kind in apply]
        yield from settings_suggestions(scene, kinds, for_memory=True)
        by_settings = [kind for kind in by_settings if kind not in RELEASED]
    yield from settings_suggestions(scene, by_settings)
    if "rows" in wanted:
        yield from rows_suggestion(scene, slow, memory.spec.members)
    if "stages" in wanted:
        yield from stages_suggestion(scene)


def _offer(memory: MachineMemory, suggestion: Suggestion, asked: Asked) -> Offer | None:
    """Find what a suggestion promises, by the planner's answer or by the cost of its settings."""
    assert memory.spec is not None
    question, running = asked.question, memory.spec.layout
    if suggestion.saves is not None and suggestion.layout is not None:
        return _unlike(memory, Offer(suggestion, suggestion.layout, suggestion.saves))
    now_s, _ = memory.plans.cost(running, question)
    if suggestion.question is not None:
        plan = memory.plans.answers[suggestion.question]
        if plan is None:
            return None
        layout, cost_s = plan.layout, plan.cost_s
        if is_uneven(running):
            layout, cost_s = _shared_alike(memory, asked, suggestion.question, plan)
    else:
        assert suggestion.layout is not None
        layout = suggestion.layout
        cost_s, _ = memory.plans.cost(layout, replace(question, settings=suggestion.settings))
    known = 0 < now_s < inf and cost_s < inf
    if not known and suggestion.strike is None:
        return None
    return _unlike(memory, Offer(suggestion, layout, 1 - cost_s / now_s if known else 0.0))


def _unlike(memory: MachineMemory, offer: Offer) -> Offer | None:
    """The offer, unless it is what runs."""
    assert memory.spec is not None
    same = offer.layout == memory.spec.layout and offer.suggestion.settings == memory.settings
    return None if same and not offer.suggestion.avoid else offer


def _shared_alike(
    memory: MachineMemory, asked: Asked, question: LayoutQuestion, plan: ReadyPlan
) -> tuple[Layout, float]:
    """The planner's layout with rows and blocks by speed, as the running one has them, and its seconds.

    The cost model knows of no slow worker; its factors were fitted to the running layout, in which those have
    less to do. So what it says is lengthened where they have more.
    """
    assert memory.spec is not None
    running, job, figures = memory.spec.layout, memory.job, asked.figures
    row_s, batch = known_row_s(running, figures.replica_row_s), job.data.global_batch
    layout = reshared(running, plan.layout, row_s, batch)
    if layout is not None and not layout_problems(with_settings(job, question.settings), layout):
        cost_s, _ = memory.plans.cost(layout, question)
        return layout, cost_s * rows_factor(running, layout, row_s, batch)
    kinds, other = job.adapt.apply, plan.layout
    shares = ("rows" in kinds and other.dp > 1) or ("stages" in kinds and other.pp > 1)
    slower = slowness(running, row_s, figures.stage_s, job.model, batch, shares)
    return other, plan.cost_s * slower
