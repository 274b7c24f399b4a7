"""Planning as the machine does it: what is asked, answers that come, and a change over to a better plan."""

from __future__ import annotations

from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import Event, NodeLost, PlanLayouts, Planned, Tick, WorkerExited
from picotron_ray.coordinator.policies import replan
from picotron_ray.coordinator.policies.adaptation import REASON
from picotron_ray.coordinator.policies.plan_ahead import questions_ahead


def ask_planner(memory: MachineMemory, event: Event) -> None:
    """Have planned what was missed and what the next loss or node would need.

    After a loss with the next event, as members must be told of it first; else once nothing has changed
    between two ticks, as nodes come one by one.
    """
    job = memory.job
    ahead = memory.ahead
    lost, memory.lost = memory.lost, False
    if isinstance(event, NodeLost | WorkerExited) and memory.transitions:  # the first one of many
        memory.lost = True
    elif isinstance(event, Tick) or lost:
        if memory.ahead_of != memory.roster.version:
            found = questions_ahead(
                memory.roster, job.cluster.min_workers, job.cluster.max_workers, job.elastic.grow
            )
            memory.ahead_of, memory.ahead_found = memory.roster.version, tuple(found)
        ahead = tuple(memory.limited(question) for question in memory.ahead_found)
        settled = ahead == memory.ahead
        if settled:
            ahead = memory.ahead  # the very same, which the book knows
        else:
            memory.ahead = ahead
        if not lost and not settled:
            ahead = ahead[:1]
    questions = memory.plans.to_ask(ahead, memory.now)
    if questions:
        memory.emit(PlanLayouts(questions))


def planned(memory: MachineMemory, event: Planned) -> None:
    """Enter an answer of the planner; one that it could not give is told."""
    memory.plans.take(event, memory.now)
    if event.error:
        text = f"no plan for {event.question.workers} workers: {event.error}; going on without"
        memory.alert("warning", "planner", text)


def better_plan(memory: MachineMemory) -> str | None:
    """Change over to the planner's layout, where another one was taken before it had answered."""
    spec, plans = memory.spec, memory.plans
    assert spec is not None
    if not plans.fresh or not memory.progressed or memory.cap is not None:
        return None
    plans.fresh = False
    if spec.reason.startswith(REASON):  # measured, or about to be: that says more than an estimate
        return None
    members = memory.living_members()
    everyone = [*members, *(worker for worker in memory.roster.usable() if not memory.is_member(worker.name))]
    found = memory.planned(everyone, min(len(everyone), memory.job.cluster.max_workers))
    if found is None or found[0].layout == spec.layout:
        return None
    view = replan.ReplanView(
        progressed=memory.progressed,
        steps_left=memory.job.steps - memory.seen_step,
        cost_s=plans.cost_s(spec.layout, memory.question(members, len(members))),
        planned_cost_s=found[0].cost_s,
    )
    better, why = replan.decide(view)
    return f"change over to the planned {found[0].layout}: {why}" if better else None
