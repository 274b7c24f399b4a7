"""Orders of operators: pause, resume, resize, drain; and requests of whoever follows a run.

An order is judged at once, and an alert of kind ``order`` says whether it is accepted; told twice it changes
nothing. What it brings about follows from the memory, at the next step boundary, or where a recovery would
launch. So an order is safe at any time. Orders hold until they are taken back, or the launch ends: the alert
has all that a later term needs to know (``Begin.standing``).

A paused run has its state committed and no workers, so that devices and Ray's resources are free. Agents
stay, and with them the snapshots in host memory, from which it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from picotron_ray.config.settings import with_settings
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.drains import notice, save
from picotron_ray.coordinator.generation_stop import kill
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.policies.membership import first_of
from picotron_ray.coordinator.states import MachineState
from picotron_ray.errors import ConfigError
from picotron_ray.planner.allowed_sizes import size_problem

ORDER = "order"  # kind of the alerts that answer
MOST_NAMED = 8  # nodes in an answer
RECOVERING = (MachineState.LEAVING, MachineState.ABORTING, MachineState.COLLECTING)


def user_request(memory: MachineMemory, event: m.UserRequest) -> None:
    """Obey a user; members that may have missed a call for a checkpoint are asked again once they train."""
    if event.what == "checkpoint":
        running = memory.state is MachineState.RUNNING
        memory.save_asked = not running or not memory.progressed
        if running:
            save(memory)
        return
    memory.again = event.what == "requeue" and (memory.again or not memory.stop_requested)
    memory.stop_requested = True


def order(memory: MachineMemory, event: m.Order) -> None:
    """Judge an order, note it, and answer."""
    data: dict[str, Any] = {"order": event.what, "accepted": True}
    try:
        if memory.stop_requested or memory.state is MachineState.FINALISING:
            raise ConfigError("the run is about to end")
        text, more = _JUDGES[event.what](memory, event)
    except ConfigError as error:
        text = f"{event.what} refused: {error}"
        memory.alert("warning", ORDER, text, **{**data, "accepted": False})
        return
    memory.alert("info", ORDER, text, **data, **more)


Answer = tuple[str, dict[str, Any]]


def _pause(memory: MachineMemory, event: m.Order) -> Answer:
    if memory.paused:
        return ("the run is paused already" if _rests(memory) else "the run is being paused already"), {}
    memory.paused = True
    if memory.state in RECOVERING:
        return f"pause: once what is under way is over (the run is {memory.state})", {}
    at = "at the next step boundary, with a commit" if memory.in_generation else "before it trains"
    return f"pause: {at}", {}


def _resume(memory: MachineMemory, event: m.Order) -> Answer:
    if not memory.paused:
        return "resume: the run is not paused", {}
    rests, memory.paused = _rests(memory), False
    return "resume: workers are started" if rests else "resume: the pause is taken back", {}


def _rests(memory: MachineMemory) -> bool:
    return memory.state is MachineState.PAUSED


def _resize(memory: MachineMemory, event: m.Order) -> Answer:
    """Change the numbers of workers; where both are as they were, nothing is to be done."""
    cluster = memory.job.cluster
    most = event.max_workers or cluster.max_workers
    least = event.min_workers or min(cluster.min_workers, most)
    if not 1 <= least <= most:
        raise ConfigError(f"saw min={least} and max={most} workers, expected 1 or more, and min at most max")
    if event.max_workers and (problem := size_problem(with_settings(memory.job, memory.settings), most)):
        raise ConfigError(problem)
    sizes = {"min_workers": least, "max_workers": most}
    if (least, most) == (cluster.min_workers, cluster.max_workers):
        return f"resize: {least} to {most} workers, as it is{_said_room(memory, most)}", sizes
    if event.max_workers and not _fits(memory, most):
        raise ConfigError(
            f"no layout on {most} workers fits into their memory, or none is planned yet: ask again later"
        )
    _set_sizes(memory, least, most)
    when = "" if memory.state is MachineState.RUNNING else f", once the run trains (it is {memory.state})"
    return f"resize: {least} to {most} workers{when}{_said_room(memory, most)}", sizes


def _rooms(memory: MachineMemory) -> list[int]:
    """Workers that each node can take which stays and is let take part, most first."""
    nodes = memory.roster.nodes.values()
    return sorted((node.capacity for node in nodes if not node.draining and not node.barred), reverse=True)


def _said_room(memory: MachineMemory, most: int) -> str:
    """Say what the nodes that are there can take, where that is less than ``most``; else ""."""
    room = sum(_rooms(memory))
    if room >= most:
        return ""
    autoscale = memory.job.cluster.autoscale
    asked = (
        "Ray's autoscaler is asked for them" if autoscale else "cluster.autoscale is off: none is asked for"
    )
    return f"; the nodes have room for {room} now, and the run grows when more join ({asked})"


def _fits(memory: MachineMemory, workers: int) -> bool:
    """Whether a layout is known that fits on so many workers, as the nodes have room for them."""
    nodes = memory.roster.nodes.values()
    least = min((node.device_bytes for node in nodes if node.device_bytes), default=0)
    sizes = first_of(_rooms(memory), workers)
    question = memory.limited(m.LayoutQuestion(workers, sizes, least))
    plans = memory.plans
    if plans.look_up(question):
        return plans.answers[question] is not None
    return plans.stand_in(question, None if memory.spec is None else memory.spec.layout) is not None


def _set_sizes(memory: MachineMemory, least: int, most: int) -> None:
    """Have all decisions go by these numbers, as if the job had said so."""
    sizes = {"min_workers": least, "max_workers": most}
    cluster = memory.job.cluster.model_copy(update=sizes)
    memory.job = memory.job.model_copy(update={"cluster": cluster})
    memory.resized, memory.growth_of, memory.ahead_of = True, (), ()


def _drain(memory: MachineMemory, event: m.Order) -> Answer:
    name, roster = event.node, memory.roster
    if name in memory.freed:
        return f"drain: node {name} is given back already", {"node": name, "left_s": event.left_s}
    node = roster.nodes.get(name)
    if node is None:
        named = sorted(roster.nodes)[:MOST_NAMED]
        more = f" and {len(roster.nodes) - len(named)} more" if len(roster.nodes) > len(named) else ""
        raise ConfigError(f"saw node {name!r}, the run's are: {', '.join(named) or 'none'}{more}")
    if event.left_s < 0:
        raise ConfigError(f"saw a deadline in {event.left_s:g} s, expected more than 0")
    others = [other for other in roster.nodes.values() if not other.draining and not other.barred]
    if not node.draining and not any(other.name != name for other in others):
        raise ConfigError(
            f"node {name} is the last one that the run has: pause or stop the run, or add a node before"
        )
    data = {"node": name, "left_s": event.left_s}
    if node.draining:
        memory.sent_away.setdefault(name, node.drain_deadline or 0.0)
        return f"drain: node {name} is about to go already", data
    send_away(memory, m.NodeDrain(name, event.left_s))
    return f"drain: the run moves off node {name}", data


def send_away(memory: MachineMemory, drain: m.NodeDrain) -> None:
    """Take no more work to a node, have what it holds saved, and give it back."""
    now = memory.now + memory.slept_s
    memory.sent_away[drain.node] = now + drain.left_s if drain.left_s else 0.0
    send_away_again(memory, drain.node)


def send_away_again(memory: MachineMemory, node: str) -> None:
    """Take a node that operators sent away as one that is to go, also where it joins again."""
    if node in memory.sent_away:
        notice(memory, m.DrainNotice(node, memory.sent_away[node]))


_JUDGES: Mapping[str, Callable[[MachineMemory, m.Order], Answer]] = {
    "pause": _pause,
    "resume": _resume,
    "resize": _resize,
    "drain": _drain,
}


# --- what follows ------------------------------------------------------------------------------------


def take_orders(memory: MachineMemory, event: m.Begin) -> None:
    """Take over what operators told earlier terms of this launch, and the launch's time limit."""
    said, cluster = event.standing, memory.job.cluster
    memory.paused = said.paused
    if said.max_workers:
        _set_sizes(memory, said.min_workers or cluster.min_workers, said.max_workers)
    for drain in said.draining:
        send_away(memory, drain)  # once it joins: the roster is empty
    if event.left_s is not None:
        memory.limit, memory.limit_s = event.limit, max(0.0, event.left_s)
        memory.ends_at = memory.now + memory.slept_s + event.left_s


def ordered(memory: MachineMemory) -> str | None:
    """Reason to stop the running generation for an order; None: there is none, or not yet."""
    assert memory.spec is not None
    if memory.paused:
        return "pause requested"
    most = memory.job.cluster.max_workers
    if not memory.resized or len(memory.spec.members) <= most:
        return None
    members = memory.living_members()
    return f"resize to {most} workers" if memory.choice(members, most) is not None else None


def end_surplus(memory: MachineMemory, wanted: int) -> None:
    """End workers who compute nothing, and are more than an operator wants: on the emptiest nodes first."""
    roster = memory.roster
    surplus = roster.count_alive() - wanted
    if surplus <= 0:
        return
    busy = {node: sum(w.state == "busy" for w in roster.workers.on(node)) for node in roster.nodes}
    spares = [worker for worker in roster.in_state("starting", "idle") if worker.node not in roster.leaving]
    spares.sort(key=lambda worker: (busy.get(worker.node, 0), worker.node, worker.name))
    for worker in spares[:surplus]:
        kill(memory, worker.name, "no longer wanted: the run was resized")


def standing(memory: MachineMemory) -> dict[str, Any]:
    """Orders that hold, for people and programs."""
    cluster = memory.job.cluster
    paused = "" if not memory.paused else "paused" if _rests(memory) else "pausing"
    return {
        "paused": paused,
        "held_step": memory.held_step if paused == "paused" else None,
        "min_workers": cluster.min_workers,
        "max_workers": cluster.max_workers,
        "resized": memory.resized,
        "sent_away": sorted(memory.sent_away),
    }
