"""Buttons of the page: requests to the run's coordinator, as its commands make them.

A button is offered where the run goes on here. Input is checked before anything is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from picotron_ray.errors import ConfigError

Words = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Door:
    """A button.

    Fields:
        fields: names of the words that it takes, with a label each.
        asks: what the page asks before it presses; "": nothing.
        open: whether this version can do it.
    """

    name: str
    label: str
    fields: Mapping[str, str]
    asks: str
    act: Callable[[str, Any, Words], str]
    open: bool = True


def _checkpoint(run: str, live: Any, words: Words) -> str:
    live.request("checkpoint")
    return "a commit is asked for at the next step"


def _stop(run: str, live: Any, words: Words) -> str:
    live.request("stop")
    return "the run stops at the next step, with a commit"


DOORS = {
    door.name: door
    for door in (
        Door("checkpoint", "Checkpoint now", {}, "", _checkpoint),
        Door("stop", "Stop", {}, "Stop the run at the next step, with a commit?", _stop),
    )
}


def offered(live: bool, state: str) -> list[dict[str, Any]]:
    """The buttons as the page shows them."""
    why = "" if live else "the run does not go on here"
    if live and state not in ("starting", "running"):
        why = f"the run is {state}"
    return [
        {
            "name": door.name,
            "label": door.label,
            "fields": dict(door.fields),
            "asks": door.asks,
            "enabled": not why,
            "why": why,
        }
        for door in DOORS.values()
        if door.open
    ]


def press(run: str, live: Any, name: str, words: Words) -> str:
    """Do what a button does; returns what to tell.

    Raises:
        ConfigError: there is no such button, the run does not go on here, or a word is wrong.
    """
    door = DOORS.get(name)
    if door is None or not door.open:
        raise ConfigError(f"button: saw {name!r}, expected one of {', '.join(DOORS)}")
    if live is None:
        raise ConfigError(f"run: {run!r} does not go on here; nothing was asked of it")
    unknown = sorted(set(words) - set(door.fields))
    if unknown:
        raise ConfigError(f"{name}: saw {unknown[0]!r}, expected {', '.join(door.fields) or 'no words'}")
    return door.act(run, live, words)
