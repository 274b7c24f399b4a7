"""Facts of a run as plain JSON values, and back: what a restarted coordinator begins with."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import decode, decode_spec, plain
from picotron_ray.coordinator.replay import heard
from picotron_ray.failures import FailureKind
from picotron_ray.observability.goodput import GoodputAccount
from picotron_ray.runtime.coordinator.adaptation_record import AdaptationRecord
from picotron_ray.runtime.coordinator.event_log.files import LoggedLine
from picotron_ray.runtime.coordinator.records import (
    EVENTS_KEPT,
    Facts,
    FailureRecord,
    GenerationRecord,
    involved_in,
)

_OF_A_GENERATION = ("layout", "start_step", "end_step", "source", "reason", "workers", "members_digest")
_LATER = ("predicted_s", "measured_s", "at_s")
"""Figures of a generation that records of earlier versions do not have."""
_AS_THEY_ARE = ("submissions", "checkpoints", "tokens", "committed_at_s", "skipped_step")


def plain_facts(facts: Facts) -> dict[str, Any]:
    """Return facts as JSON values; pages of workers are left out, since heartbeats bring them anew."""
    return {
        **{name: plain(getattr(facts, name)) for name in _AS_THEY_ARE},
        "events": list(facts.events),
        "step_times": list(facts.step_times),
        "noted": dict(facts.noted),
        "plans": dict(facts.plans),
        "changes": dict(facts.changes),
        "baseline_loss": facts.baseline_loss,
        "strikes": plain(facts.strikes),
        "adaptation": facts.adaptation.plain(),
        "account": facts.account.plain(),
        "evaluations": [[step, loss] for step, loss in facts.evaluations.items()],
        "set_evaluations": [[step, losses] for step, losses in facts.set_evaluations.items()],
        "generations": [_plain_generation(record) for record in facts.generations],
        "failures": [{**asdict(failure), "kind": failure.kind.value} for failure in facts.failures],
    }


def _plain_generation(record: GenerationRecord) -> dict[str, Any]:
    """Return a generation; of its members each node's name stands here once."""
    found = {name: getattr(record, name) for name in _OF_A_GENERATION}
    found |= {"term": record.id.term, "n": record.id.n, "settings": plain(record.settings)}
    found |= {name: getattr(record, name) for name in _LATER}
    members = record.members
    if members is not None:
        nodes = {node: at for at, node in enumerate(dict.fromkeys(member.node for member in members))}
        found |= {"names": [member.worker for member in members], "nodes": list(nodes)}
        found["on"] = [nodes[member.node] for member in members]
    return found


def _read_generation(data: dict[str, Any]) -> GenerationRecord:
    if "spec" in data:  # of before members were left out
        record = GenerationRecord.of(decode_spec(data["spec"]))
        record.end_step = data["end_step"]
        return record
    members = None
    if "names" in data:
        pairs = zip(data["names"], data["on"], strict=True)
        members = tuple(m.Member(name, data["nodes"][at]) for name, at in pairs)
    fields = {name: data[name] for name in _OF_A_GENERATION}
    fields["settings"] = tuple((key, text) for key, text in data.get("settings", ()))
    fields |= {name: data.get(name, 0.0) for name in _LATER}
    of = m.GenerationId(data["term"], data["n"])
    return GenerationRecord(id=of, members=members, involved=involved_in(members or ()), **fields)


def read_facts(data: dict[str, Any], began_s: float = 0.0, wall_s: float = 0.0) -> Facts:
    """Read the facts of ``plain_facts``; ValueError, KeyError or TypeError where they are of another form.

    Args:
        began_s, wall_s: begin of the run and its time until then, of which an older record has no account.
    """
    facts = Facts(**{name: data[name] for name in _AS_THEY_ARE})
    facts.events = deque(data["events"], maxlen=EVENTS_KEPT)
    facts.step_times.extend(data["step_times"])
    facts.noted = Counter(data["noted"])
    facts.plans = Counter(data.get("plans", {}))
    facts.changes = Counter(data.get("changes", {}))
    facts.strikes = tuple(m.Strike(**entry) for entry in data.get("strikes", ()))
    facts.adaptation = AdaptationRecord.read(data.get("adaptation", {}))
    facts.evaluations = dict(data["evaluations"])
    facts.set_evaluations = dict(data.get("set_evaluations", ()))
    facts.baseline_loss = data.get("baseline_loss")
    facts.generations = [_read_generation(entry) for entry in data["generations"]]
    for entry in data["failures"]:
        at = entry.pop("generation", None)  # of before ``struck`` told it
        if at is not None and not entry.get("struck"):
            entry["struck"] = str(facts.generations[at].id)
        facts.failures.append(FailureRecord(**{**entry, "kind": FailureKind(entry["kind"])}))
    facts.account = GoodputAccount.unseen(began_s, began_s + wall_s, len(facts.failures))
    if "account" in data:
        facts.account = GoodputAccount.read(data["account"])
        facts.account.follow(len(facts.failures))
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
