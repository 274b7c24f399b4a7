"""Event log of a run, and the proof that it replays: the same events give the same commands.

One JSON line per event: ``{"now": seconds, "event": {...}, "commands": [...]}``. The first line is the
header ``{"job": {...}, "planner": {...}}``: all that the machine was made from. A log that no longer
replays means that the machine is not pure, or that its behaviour has changed since.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.codec import decode, encode, plain
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.machine_memory import Choose
from picotron_ray.coordinator.messages import Alert, Command, Event
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import current_names


def header_line(job: JobConfig, planner: dict[str, Any]) -> str:
    """Return the first line of a log.

    Args:
        planner: whatever the caller needs to build the same ``choose`` again.
    """
    return _dump({"job": job.model_dump(mode="json"), "planner": planner})


def event_line(now: float, event: Event, commands: Sequence[Command]) -> str:
    """Return the line of one handled event."""
    return _dump({"now": now, "event": encode(event), "commands": [encode(c) for c in commands]})


def _dump(value: Any) -> str:
    return json.dumps(plain(value), separators=(",", ":"), sort_keys=True)


def _plain_commands(commands: Iterable[Command]) -> list[dict[str, Any]]:
    plain_commands: list[dict[str, Any]] = json.loads(_dump([encode(command) for command in commands]))
    return plain_commands


def _respelled(command: Command) -> Command:
    """Return ``command`` with its kind of failure as it is spelled now."""
    kind = FailureKind.named(str(command.data.get("cause", ""))) if isinstance(command, Alert) else None
    if kind is None or not isinstance(command, Alert):
        return command
    return replace(command, data={**command.data, "cause": kind.value})


@dataclass(frozen=True, slots=True)
class Difference:
    """The first line whose commands came out otherwise. ``line`` counts from 1."""

    line: int
    recorded: list[dict[str, Any]]
    replayed: list[dict[str, Any]]

    def __str__(self) -> str:
        return f"line {self.line}: recorded {self.recorded}, replayed {self.replayed}"


@dataclass(frozen=True, slots=True)
class Replay:
    """Outcome of a replay: events handled, and the first difference (None: identical)."""

    events: int
    difference: Difference | None


def replay(lines: Iterable[str], planner: Callable[[JobConfig, dict[str, Any]], Choose]) -> Replay:
    """Feed a log to a fresh machine and compare. ``planner`` builds ``choose`` from the header.

    Each new term starts a new machine, so the log of a restarted coordinator replays as a whole.
    Raises ValueError for a log without header or with an unknown message.
    """
    rows = iter(lines)
    head = json.loads(next(rows, "null"))
    if not isinstance(head, dict) or "job" not in head:
        raise ValueError("event log: the first line is not a header with the job")
    job = JobConfig.model_validate(head["job"])
    choose = planner(job, head.get("planner", {}))
    machine, term, events = Machine(job, choose), 0, 0
    for number, row in enumerate(rows, start=2):
        if not row.strip():
            continue
        data = json.loads(current_names(row))
        if data["event"].get("type") == "Begin" and data["event"]["term"] != term:
            machine, term = Machine(job, choose), data["event"]["term"]
        commands = machine.handle(decode(data["event"]), data["now"])
        events += 1
        # decoded first: a log of before a field was added has had its default
        recorded = _plain_commands(_respelled(decode(command)) for command in data["commands"])
        replayed = _plain_commands(commands)
        if replayed != recorded:
            return Replay(events, Difference(number, recorded, replayed))
    return Replay(events, None)
