"""Standing orders of a simulated run: the record of them that a next term reads, and what must hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.operator_orders import ORDER
from picotron_ray.coordinator.states import MachineState

if TYPE_CHECKING:
    from picotron_ray.coordinator.simulator.operated import OperatedShell, OperatedSim

FREED_S = 12.0  # from the pause until no worker holds a device: an order to die may have to be repeated
OBEYED_S = 45.0  # until a pause has come about, or nobody computes beyond a new size, with nothing disturbed
BUSY = (MachineState.RUNNING, MachineState.LEAVING, MachineState.ABORTING, MachineState.COLLECTING)


class Standing:
    """Orders of operators by what the coordinators answered, and what must hold of them."""

    def __init__(self, sim: OperatedSim) -> None:
        self._sim = sim
        self.paused, self.paused_at = False, 0.0
        self.least = self.most = 0
        self.resized_at = 0.0
        self.draining: dict[str, float] = {}  # when each node must be left; 0: no deadline
        self.limit_at: float | None = None
        self.answers = {"accepted": 0, "refused": 0}
        self._rests_since: float | None = None

    def past(self) -> dict[str, Any]:
        """Fields of a term's first event."""
        now = self._sim.now
        drains = tuple(
            m.NodeDrain(node, max(0.1, at - now) if at else 0.0) for node, at in self.draining.items()
        )
        found: dict[str, Any] = {"standing": m.StandingOrders(self.paused, self.least, self.most, drains)}
        if self.limit_at is not None:
            found |= {"left_s": self.limit_at - now, "limit": "cluster.max_wall_s"}
        return found

    def told(self, alert: m.Alert) -> None:
        """Hear an answer."""
        if alert.kind != ORDER:
            return
        data, now = alert.data, self._sim.now
        self.answers["accepted" if data["accepted"] else "refused"] += 1
        if not data["accepted"]:
            return
        if data["order"] in ("pause", "resume"):
            self.paused_at = self.paused_at if self.paused else now
            self.paused = data["order"] == "pause"
        elif data["order"] == "resize":
            self.least, self.most, self.resized_at = data["min_workers"], data["max_workers"], now
        else:
            left_s = data["left_s"]
            self.draining.setdefault(data["node"], now + left_s if left_s else 0.0)

    def judged(self, shell: OperatedShell, before: MachineState, commands: Sequence[m.Command]) -> None:
        """Check what follows from one event of the present coordinator."""
        memory, say = shell.machine.memory, self._sim.violation
        for command in commands:
            if isinstance(command, m.Alert):
                self.told(command)
        if memory.state is MachineState.DONE:
            return
        if memory.paused is not self.paused:
            say(f"an operator said paused={self.paused}, and the machine knows {memory.paused}")
        if self.most and memory.job.cluster.max_workers != self.most:
            say(f"resized to {self.most}, and the machine goes by {memory.job.cluster.max_workers}")
        if lost := self.draining.keys() - memory.sent_away.keys() - memory.freed:
            say(f"nodes that were sent away are forgotten: {sorted(lost)}")
        for command in commands:
            if isinstance(command, m.RunGeneration) and not command.adopt:
                self._launched(command.spec)
            elif isinstance(command, m.StartWorker) and (self.paused or command.node in self.draining):
                say(f"{command.worker} is started on {command.node}: {self.paused=}, {self.draining=}")
        rests = memory.state is MachineState.PAUSED
        self._rests_since = (self._rests_since or self._sim.now) if rests else None

    def _launched(self, spec: m.GenerationSpec) -> None:
        say = self._sim.violation
        if self.paused:
            say(f"{spec.id} is launched while the run is paused")
        if self.most and len(spec.members) > self.most:
            say(f"{spec.id} has {len(spec.members)} members, {self.most} are wanted")
        if away := {member.node for member in spec.members} & self.draining.keys():
            say(f"{spec.id} uses {sorted(away)}, which was sent away")

    def ticked(self, shell: OperatedShell) -> None:
        """Check what must have come about by now."""
        sim, memory, say = self._sim, shell.machine.memory, self._sim.violation
        calm = sim.checks_of.promptness.calm_since()
        if self.limit_at is not None and calm < self.limit_at - OBEYED_S and sim.now > self.limit_at:
            say(f"still {memory.state} {sim.now - self.limit_at:.1f} s after the time limit")
        if self._rests_since is not None and sim.now - max(calm, self._rests_since) > FREED_S:
            left = [w.name for node in sim.nodes.values() for w in node.workers.values() if w.ready]
            if left:
                say(f"the run is paused, and {left} hold their devices")
        obeyed_s = OBEYED_S + 2 * sim.step_s
        if self.paused and memory.state in BUSY and sim.now - max(calm, self.paused_at) > obeyed_s:
            say(f"paused {sim.now - self.paused_at:.0f} s ago, and still {memory.state}")
        settled = memory.state is MachineState.RUNNING and memory.progressed and not memory.roster.leaving
        if self.most and settled and sim.now - max(calm, self.resized_at) > obeyed_s:
            alive = memory.roster.count_alive()
            if alive > self.most:
                say(f"resized to {self.most} {sim.now - self.resized_at:.0f} s ago, and {alive} workers live")

    def stepped(self) -> None:
        """Check that nobody computes once the run is paused."""
        sim = self._sim
        since = self._rests_since
        if since is not None and sim.now - max(since, sim.checks_of.promptness.calm_since()) > FREED_S:
            sim.violation(f"a step is finished {sim.now - since:.0f} s after the pause")

    def ended(self, finish: m.Finish) -> None:
        """Check that a run with a limit ends in time, and says that it is to be launched again."""
        sim = self._sim
        if self.limit_at is None or finish.status != "stopped":
            return
        if not finish.again:
            sim.violation("stopped by its time limit, and does not say so")
