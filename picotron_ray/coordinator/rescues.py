"""Rescues: slots that an agent saves, because somebody deleted its folder under living workers.

The agent stops these workers, moves what they sealed into a folder made anew, kills them and reports their
end. Its heartbeats name them until then. Meanwhile they cannot answer, and their death would lose what is not
moved yet: none of them is blamed or swept, and no state to go on from is chosen. The agent bounds the time by
the bytes that it has to move, and names them no longer when that is over.
"""

from __future__ import annotations

from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import Heartbeat
from picotron_ray.coordinator.recovery import ask_again
from picotron_ray.coordinator.states import MachineState


def note_rescues(memory: MachineMemory, event: Heartbeat) -> None:
    """Note who is rescued on a node, and since this heartbeat no longer is: it has time to be dead then."""
    if event.node not in memory.roster.nodes or not (event.rescued or memory.rescued):
        return
    before = {name for name, node in memory.rescued.items() if node == event.node}
    over = before.difference(event.rescued)
    memory.rescued.update(dict.fromkeys(event.rescued, event.node))
    for name in over:
        del memory.rescued[name]
        worker = memory.roster.workers.get(name)
        if worker is not None and worker.state == "dying":
            worker.since = memory.now
    if over and memory.state is MachineState.COLLECTING:
        ask_again(memory, event.node)


def forget_rescues(memory: MachineMemory, node: str) -> None:
    """Wait no longer for what was rescued on a node that is lost."""
    for name in [name for name, home in memory.rescued.items() if home == node]:
        del memory.rescued[name]
