"""Buttons of the page: requests to the run's coordinator, by the functions that its commands call.

A button is offered where this version has its function, and works while the run goes on here. Words are
checked before anything is asked; the coordinator alone accepts or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import control

Words = Mapping[str, str]
GOES_ON = ("starting", "running", "paused")


@dataclass(frozen=True, slots=True)
class Door:
    """A button.

    Fields:
        act: takes the run's name, its `LiveSource` and the words; returns what to tell.
        fields: labels of the words that it takes, by name; those of ``optional`` may be left out.
        asks: what the page asks before it presses; "": nothing.
        states: of the run, in which it works.
    """

    name: str
    label: str
    act: Callable[[str, Any, Words], str]
    fields: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    asks: str = ""
    states: tuple[str, ...] = GOES_ON


def _checkpoint(run: str, live: Any, words: Words) -> str:
    live.request("checkpoint")
    return "a commit is asked for at the next step"


def _stop(run: str, live: Any, words: Words) -> str:
    live.request("stop")
    return "the run stops at the next step, with a commit"


def _ordered(name: str, run: str, *words: Any, **more: Any) -> str:
    """Give an order by its function; returns the coordinator's answer."""
    return str(getattr(control, name)(run, *words, **more)["text"])


def _drain(run: str, live: Any, words: Words) -> str:
    left_s = words.get("left_s", "")
    return _ordered("drain", run, words["node"], _whole("seconds", left_s) if left_s else 0.0)


def _resize(run: str, live: Any, words: Words) -> str:
    least, most = (_whole(name, words[name]) if words.get(name) else None for name in ("min", "max"))
    return _ordered("resize", run, least, most)


def _whole(what: str, word: str) -> int:
    if not (word.isdecimal() and len(word) < 8 and int(word)):
        raise ConfigError(f"{what}: saw {word[:40]!r}, expected a whole number of at least 1")
    return int(word)


DOORS = {
    door.name: door
    for door in (
        Door("checkpoint", "Checkpoint now", _checkpoint, states=("starting", "running")),
        Door(
            "drain",
            "Drain node",
            _drain,
            {"node": "Node (the begin of its id)", "left_s": "Seconds that it has (may be left out)"},
            ("left_s",),
            "Move the run off a node, which it gives back?",
        ),
        Door(
            "resize",
            "Resize",
            _resize,
            {"min": "Fewest workers", "max": "Most workers"},
            ("min", "max"),
            "Change the fewest and the most workers?",
        ),
        Door(
            "pause",
            "Pause",
            lambda run, live, words: _ordered("pause", run, wait_s=0.0),
            asks="Commit, and free the devices until the run is resumed?",
            states=("starting", "running"),
        ),
        Door("resume", "Resume", lambda run, live, words: _ordered("resume", run), states=("paused",)),
        Door("stop", "Stop", _stop, asks="Stop the run at the next step, with a commit?"),
    )
}
_ORDERS = ("drain", "resize", "pause", "resume")


def _is_open(door: Door) -> bool:
    return door.name not in _ORDERS or hasattr(control, door.name)


def offered(live: bool, state: str) -> list[dict[str, Any]]:
    """The buttons as the page shows them."""
    return [
        {
            "name": door.name,
            "label": door.label,
            "fields": [[name, label, name not in door.optional] for name, label in door.fields.items()],
            "asks": door.asks,
            "enabled": live and state in door.states,
            "why": "" if live and state in door.states else _why(live, state),
        }
        for door in DOORS.values()
        if _is_open(door)
    ]


def _why(live: bool, state: str) -> str:
    return f"the run is {state}" if live else "the run does not go on here"


def press(run: str, live: Any, name: str, words: Words) -> str:
    """Do what a button does; returns what to tell.

    Raises:
        ConfigError: there is no such button, the run does not go on here, or a word is wrong.
    """
    door = DOORS.get(name)
    if door is None or not _is_open(door):
        known = ", ".join(one.name for one in DOORS.values() if _is_open(one))
        raise ConfigError(f"button: saw {name[:40]!r}, expected one of {known}")
    if live is None:
        raise ConfigError(f"run: {run!r} does not go on here; nothing was asked of it")
    unknown = sorted(set(words) - set(door.fields))
    if unknown:
        raise ConfigError(f"{name}: saw {unknown[0][:40]!r}, expected {', '.join(door.fields) or 'no words'}")
    for field_ in door.fields:
        if field_ not in door.optional and not words.get(field_):
            raise ConfigError(f"{name}: saw no {field_}, expected one")
    return door.act(run, live, words)
