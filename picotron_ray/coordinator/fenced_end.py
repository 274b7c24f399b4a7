"""End of a coordinator whose term is over, as whoever claimed a newer one says.

Another coordinator goes on with the run. ``checkpoints gc`` does not: it claims a term since the log has one
writer, and goes. What it ended is told as that. The slots are kept: the next launch goes on from them, unless
the run went on from another state meanwhile.
"""

from __future__ import annotations

from picotron_ray.coordinator.final_wait import KEPT
from picotron_ray.coordinator.messages import Finish, Source

GARBAGE = ":gc"
"""End of the owner's name in a term that ``checkpoints gc`` claimed."""


def fenced_end(owner: str, run: str) -> Finish:
    """End that a claim by ``owner`` (``host:pid``, as the log has it; "": not known) brings."""
    who = owner.removesuffix(GARBAGE)
    host, _, pid = who.rpartition(":")
    by = f" (process {pid} on {host})" if host and pid.isdecimal() else ""
    if not owner.endswith(GARBAGE):
        why = f"a newer coordinator{by} has taken over; this one stops, {KEPT}"
        return Finish("fenced", why, Source("slots"))
    why = f"`checkpoints gc`{by} claimed the run's log, which has one writer; nobody has taken the run over"
    return Finish("fenced", f"{why}, {KEPT}: launch run {run} again to go on", Source("slots"))
