"""Facts of a run as plain JSON values, and back: what a restarted coordinator begins with."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode, decode_spec, plain
from picotron_ray.coordinator.replay import heard
from picotron_ray.failures import FailureKind
from picotron_ray.runtime.coordinator.event_log.files import LoggedLine
from picotron_ray.runtime.coordinator.records import (
    EVENTS_KEPT,
    Facts,
    FailureRecord,
    GenerationRecord,
    involved_in,
)

_AS_THEY_ARE = ("submissions", "checkpoints", "tokens", "committed_at_s", "skipped_step")


def plain_facts(facts: Facts) -> dict[str, Any]:
    """Return facts as JSON values; pages of workers are left out, since heartbeats bring them anew."""
    return {
        **{name: plain(getattr(facts, name)) for name in _AS_THEY_ARE},
        "events": list(facts.events),
        "step_times": list(facts.step_times),
        "noted": dict(facts.noted),
        "plans": dict(facts.plans),
        "baseline_loss": facts.baseline_loss,
        "evaluations": [[step, loss] for step, loss in facts.evaluations.items()],
        "generations": [
            {"spec": plain(_without_slots(record.spec)), "end_step": record.end_step}
            for record in facts.generations
        ],
        "failures": [_plain_failure(failure, facts) for failure in facts.failures],
    }


def _without_slots(spec: m.GenerationSpec) -> m.GenerationSpec:
    """The spec without the slots that it came from: at 1,000 ranks they are most of it, and no one asks."""
    return replace(spec, source=replace(spec.source, slots=()))


def _plain_failure(failure: FailureRecord, facts: Facts) -> dict[str, Any]:
    struck = [i for i, record in enumerate(facts.generations) if record.involved is failure.involved]
    figures = {name: value for name, value in asdict(failure).items() if name != "involved"}
    return {**figures, "kind": failure.kind.value, "generation": struck[0] if struck else None}


def read_facts(data: dict[str, Any]) -> Facts:
    """Read the facts of ``plain_facts``; ValueError, KeyError or TypeError where they are of another form."""
    facts = Facts(**{name: data[name] for name in _AS_THEY_ARE})
    facts.events = deque(data["events"], maxlen=EVENTS_KEPT)
    facts.step_times.extend(data["step_times"])
    facts.noted = Counter(data["noted"])
    facts.plans = Counter(data.get("plans", {}))
    facts.evaluations = dict(data["evaluations"])
    facts.baseline_loss = data.get("baseline_loss")
    for entry in data["generations"]:
        spec = decode_spec(entry["spec"])
        facts.generations.append(GenerationRecord(spec, entry["end_step"], involved_in(spec)))
    for entry in data["failures"]:
        at = entry.pop("generation")
        involved = frozenset() if at is None else facts.generations[at].involved  # the very same, as before
        kind = FailureKind(entry.pop("kind"))
        facts.failures.append(FailureRecord(kind=kind, involved=involved, **entry))
    return facts


def observations(lines: Iterable[LoggedLine]) -> Iterator[tuple[str, m.Event, list[m.Command], float]]:
    """Yield what lines hold: launch, event, commands, and the time in seconds since the epoch."""
    for line in lines:
        launch = line.head.get("launch", "")
        offset_s = line.head.get("offset_s", time.time() - time.monotonic())  # of an older log: this boot's
        for now, beat in heard(line.data):
            yield launch, beat, [], now + offset_s
        commands = [decode(command) for command in line.data["commands"]]
        yield launch, decode(line.data["event"]), commands, line.data["now"] + offset_s
