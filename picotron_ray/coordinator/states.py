"""The states of the coordinator's machine, which may follow which, and which end the run.

::

    NEW ─► STARTING ──────────────► COLLECTING ─► RUNNING ─► LEAVING ──► COLLECTING ...
     └───► RUNNING (adopted)            │  ▲          └────► ABORTING ─► COLLECTING ...
                                        │  └── WAITING, FINALISING
                                        └────► WAITING, FINALISING ─► DONE

Every decision about where to go on from is taken in one place: when COLLECTING has heard all nodes.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    NEW = "new"  # before Begin
    STARTING = "starting"  # waiting for the workers of the first generation of this term
    RUNNING = "running"  # a generation trains
    LEAVING = "leaving"  # its members stop together, in order
    ABORTING = "aborting"  # its members are torn out of their collectives, or killed
    COLLECTING = "collecting"  # asking the nodes which snapshots they hold
    WAITING = "waiting"  # too few workers to go on
    FINALISING = "finalising"  # the last state is being committed
    DONE = "done"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.NEW: frozenset({State.STARTING, State.RUNNING, State.DONE}),
    State.STARTING: frozenset({State.COLLECTING, State.DONE}),
    State.RUNNING: frozenset({State.LEAVING, State.ABORTING, State.DONE}),
    State.LEAVING: frozenset({State.ABORTING, State.COLLECTING, State.DONE}),
    State.ABORTING: frozenset({State.COLLECTING, State.DONE}),
    State.COLLECTING: frozenset({State.RUNNING, State.WAITING, State.FINALISING, State.DONE}),
    State.WAITING: frozenset({State.COLLECTING, State.DONE}),
    State.FINALISING: frozenset({State.COLLECTING, State.DONE}),
    State.DONE: frozenset(),
}


def terminal(state: State) -> bool:
    """Whether nothing follows ``state``."""
    return not TRANSITIONS[state]
