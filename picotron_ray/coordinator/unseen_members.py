"""Members that the heartbeats of their node do not show, though the node itself is heard.

A member is judged by its page: its phase lasts too long, or its process is gone. Where the page was removed,
or its agent cannot read it, the member is neither, its snapshots are not reported, and nobody would ever
notice. So a member is ended that its node's heartbeats lack for longer than ``elastic.node_timeout_s``, the
time after which the silence of a node counts.

A worker has its page before it is ready, so it is a member only with one. Its start has a limit of its own
(``housekeeping.keep_house``), and so has the first phase of a generation (``housekeeping.watch_launch``).
"""

from __future__ import annotations

from picotron_ray.coordinator.generation_stop import blame, kill
from picotron_ray.coordinator.machine_memory import MachineMemory
from picotron_ray.coordinator.messages import Heartbeat
from picotron_ray.coordinator.states import MachineState
from picotron_ray.failures import FailureKind

AT_WORK = (MachineState.RUNNING, MachineState.LEAVING)
"""States in which members are expected. In ABORTING each has to answer, and is killed where it does not."""


def look_for_members(memory: MachineMemory, event: Heartbeat) -> None:
    """Note since when a heartbeat's node shows none of its members' pages, and forget those that it shows."""
    members = memory.members_on(event.node)
    if memory.state not in AT_WORK or (members <= event.steps.keys() and not memory.unseen):
        return
    seen = {*event.steps, *event.others}
    for name in members:
        worker = memory.roster.workers.get(name)
        if name in seen or worker is None or worker.state != "busy":
            memory.unseen.pop(name, None)
        else:
            memory.unseen.setdefault(name, memory.now)


def end_unseen(memory: MachineMemory) -> None:
    """Abort a generation whose node has been heard for long enough without a member, and end that member.

    What counts is the time up to the node's newest heartbeat: while it says nothing, its silence is judged.
    """
    if not memory.unseen or memory.state not in AT_WORK:
        return
    limit_s = memory.job.elastic.node_timeout_s
    for member in memory.unsettled():
        since, node = memory.unseen.get(member.worker), memory.roster.nodes.get(member.node)
        if since is None or node is None or node.agent_gone_at is not None:
            continue
        if memory.roster.workers[member.worker].state != "busy" or node.last_seen - since < limit_s:
            continue
        text = (
            f"worker {member.worker} is missing from the heartbeats of node {member.node} for"
            f" {node.last_seen - since:.1f} s: its page is gone, or cannot be read"
        )
        blame(memory, FailureKind.HANG, member.worker, culprit=True, text=text)
        kill(memory, member.worker, "its node does not see it any more")
