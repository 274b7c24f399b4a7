"""Event log of a run, and the proof that it replays: the same events give the same commands.

One JSON line per event: ``{"now": seconds, "event": {...}, "commands": [...]}``. The first line is the
header ``{"job": {...}, "planner": {...}}``: all that the machine was made from. A log that no longer
replays means that the machine is not pure, or that its behaviour has changed since. The planner's answers are
events of the log where its header says ``"answers": "events"``; in older logs they are found again.

Ticks and heartbeats that nothing follows from get no line (``Machine.eventful``). What such heartbeats told
is folded into the next line, ``heard``: by node the newest one's time, generation and step. A line also has
the machine's ``slept``, which a replay without those ticks could not find, and its number ``i`` in the term.

A log that has grown goes on in further parts, each with the header and its number, ``part``. What the machine
knew at a part's beginning is in the parts before, so a replay takes them all, in order, and refuses others.

A line on disk begins with its digest (``seal``), so a torn one is known and skipped. Lines of older logs have
none of this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from picotron_ray.config.export import public_dict
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.storage_urls import redact_words
from picotron_ray.coordinator.codec import decode, encode, plain
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.messages import Alert, Command, Event, GenerationId, Heartbeat
from picotron_ray.coordinator.plan_book import Choose, Default
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import current_names


def header_line(job: JobConfig, planner: dict[str, Any], **more: Any) -> str:
    """Return the first line of a log, without secrets.

    Args:
        planner: whatever the caller needs to build planner and defaults again. ``"answers": "events"`` where
            the machine hears the planner's answers as events.
        more: further fields, for other readers.
    """
    return _dump({"job": public_dict(job), "planner": planner, **more})


def event_line(now: float, event: Event, commands: Sequence[Command], **more: Any) -> str:
    """Return the line of one handled event; words of libraries in it are without secrets.

    Args:
        more: further fields of the line: ``i``, ``slept`` (seconds) and ``heard`` (``QuietHeartbeats.take``).
    """
    told = {"now": now, "event": encode(event), "commands": [encode(c) for c in commands], **more}
    return redact_words(_dump(told))


def seal(line: str) -> str:
    """Return a line with its digest before it."""
    return f"{_digest(line)} {line}"


def unseal(text: str) -> str | None:
    """Return the line that ``seal`` was given; None where it is torn. Older lines stay as they are."""
    if text.startswith("{"):
        return text
    digest, _, line = text.partition(" ")
    return line if line and digest == _digest(line) else None


def _digest(line: str) -> str:
    return blake2b(line.encode(), digest_size=8).hexdigest()


class QuietHeartbeats:
    """Heartbeats since the last line of a log that have none of their own: the newest of each node.

    One that came late may tell fewer steps of a generation than the one before it: the most are kept.
    """

    def __init__(self) -> None:
        self._newest: dict[str, tuple[float, Heartbeat, int]] = {}

    def add(self, now: float, event: Event) -> None:
        """Take an event that is not eventful; ticks leave nothing."""
        if isinstance(event, Heartbeat):
            most = max(event.steps.values(), default=0)
            before = self._newest.get(event.node)
            if before is not None and before[1].generation == event.generation:
                most = max(most, before[2])
            self._newest[event.node] = now, event, most

    def take(self) -> list[Any]:
        """Return ``[time, node, generation, most steps]`` of each, in the order of time, and forget them."""
        found = [
            [now, beat.node, plain(beat.generation), most]
            for now, beat, most in sorted(self._newest.values(), key=lambda entry: entry[0])
        ]
        self._newest.clear()
        return found


def heard(data: dict[str, Any]) -> Iterator[tuple[float, Heartbeat]]:
    """Yield time and content of the heartbeats that were folded into a line."""
    for now, node, generation, step in data.get("heard", ()):
        of = None if generation is None else GenerationId(**generation)
        yield now, Heartbeat(node, of, {"": step})


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


Planners = Callable[[JobConfig, dict[str, Any]], tuple[Choose, Default]]
"""Builds the planner, and what finds default layouts, from the two parts of a header."""


def machine_of(head: dict[str, Any], planners: Planners) -> Callable[[], Machine]:
    """Return what makes a fresh machine for each term of the log with this header."""
    job, facts = JobConfig.model_validate(head["job"]), head.get("planner", {})
    choose, default = planners(job, facts)
    asked = None if facts.get("answers") == "events" else choose
    return lambda: Machine(job, asked, default, facts.get("flush_s", 0.0))


def part_header(header: str, part: int) -> str:
    """Return the first line of a later part of a log with this header."""
    return _dump({**json.loads(header), "part": part})


def _check_part(head: dict[str, Any], expected: int) -> None:
    found = head.get("part", 0)
    if found != expected:
        raise ValueError(
            f"event log: saw part {found} where part {expected} was expected: a part does not replay without"
            " those before it; give all parts of the term's log, in order"
        )


def replay(lines: Iterable[str], planners: Planners) -> Replay:
    """Feed a log to a fresh machine and compare.

    Each new term starts a new machine, so the log of a restarted coordinator replays as a whole.
    ``lines`` are those of all parts of a log, one after the other.
    Raises ValueError for a log without header or with an unknown message, and where a part is missing.
    """
    rows = iter(lines)
    head = json.loads(unseal(next(rows, "null").strip()) or "null")
    if not isinstance(head, dict) or "job" not in head:
        raise ValueError("event log: the first line is not a header with the job")
    _check_part(head, 0)
    fresh = machine_of(head, planners)
    machine, term, events, part = fresh(), 0, 0, 0
    for number, row in enumerate(rows, start=2):
        line = unseal(row)
        if line is None or not line.strip():
            continue
        data = json.loads(current_names(line))
        if "job" in data:
            part += 1
            _check_part(data, part)
            continue
        if data["event"].get("type") == "Begin" and data["event"]["term"] != term:
            machine, term = fresh(), data["event"]["term"]
        machine.absorb(heard(data))
        commands = machine.handle(decode(data["event"]), data["now"], data.get("slept"))
        events += 1
        # decoded first: a log of before a field was added has had its default
        recorded = _plain_commands(_respelled(decode(command)) for command in data["commands"])
        replayed = _plain_commands(commands)
        if replayed != recorded:
            return Replay(events, Difference(number, recorded, replayed))
    return Replay(events, None)
