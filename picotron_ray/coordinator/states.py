"""States of the coordinator's machine, and the transitions between them.

::

    NEW ─► STARTING ──────────────► COLLECTING ─► RUNNING ─► LEAVING ──► COLLECTING ...
     └───► RUNNING (adopted)            │  ▲          └────► ABORTING ─► COLLECTING ...
                                        │  └── WAITING, PAUSED, FINALISING
                                        └────► WAITING, PAUSED, FINALISING ─► DONE
                                                        └─────► STARTING ...

Every decision about where to go on from is taken in one place: when COLLECTING has heard all nodes.
"""

from __future__ import annotations

from enum import StrEnum


class MachineState(StrEnum):
    NEW = "new"  # before Begin
    STARTING = "starting"  # waiting for the workers of the first generation of this term
    RUNNING = "running"  # a generation trains
    LEAVING = "leaving"  # its members stop together, in order
    ABORTING = "aborting"  # its members are torn out of their collectives, or killed
    COLLECTING = "collecting"  # asking the nodes which snapshots they hold
    WAITING = "waiting"  # too few workers to go on
    PAUSED = "paused"  # an operator's order: the state is saved, the workers have ended
    FINALISING = "finalising"  # the last state is being committed
    DONE = "done"


TRANSITIONS: dict[MachineState, frozenset[MachineState]] = {
    MachineState.NEW: frozenset({MachineState.STARTING, MachineState.RUNNING, MachineState.DONE}),
    MachineState.STARTING: frozenset({MachineState.COLLECTING, MachineState.DONE}),
    MachineState.RUNNING: frozenset({MachineState.LEAVING, MachineState.ABORTING, MachineState.DONE}),
    MachineState.LEAVING: frozenset({MachineState.ABORTING, MachineState.COLLECTING, MachineState.DONE}),
    MachineState.ABORTING: frozenset({MachineState.COLLECTING, MachineState.DONE}),
    MachineState.COLLECTING: frozenset(
        {
            MachineState.RUNNING,
            MachineState.WAITING,
            MachineState.PAUSED,
            MachineState.FINALISING,
            MachineState.DONE,
        }
    ),
    MachineState.WAITING: frozenset({MachineState.COLLECTING, MachineState.DONE}),
    MachineState.PAUSED: frozenset({MachineState.STARTING, MachineState.COLLECTING, MachineState.DONE}),
    MachineState.FINALISING: frozenset({MachineState.COLLECTING, MachineState.DONE}),
    MachineState.DONE: frozenset(),
}


def terminal(state: MachineState) -> bool:
    """Whether nothing follows ``state``."""
    return not TRANSITIONS[state]
