"""Messages survive JSON, logs replay, and a changed machine is noticed."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import MESSAGES, decode, decode_spec, encode, plain
from picotron_ray.coordinator.plan_book import no_default
from picotron_ray.coordinator.replay import event_line, header_line, replay
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.layout.schedules import SCHEDULES
from tests.support.runs.coordinator_world import World, choose_dp, flush, job, outcomes, snapshot


def strategy(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type (hypothesis' own inference does not see through string annotations)."""
    origin, args = typing.get_origin(annotation), get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        fields = {field.name: strategy(hints[field.name]) for field in dataclasses.fields(annotation)}
        if annotation is Layout:
            fields["schedule"] = st.sampled_from(list(SCHEDULES))
        return st.builds(annotation, **fields)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if arg is type(None) else strategy(arg) for arg in args))
    if origin is tuple:
        return st.lists(strategy(args[0]), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(max_size=3), st.integers(0, 9), max_size=2)
    simple = {int: st.integers(0, 9), float: st.floats(0, 9), str: st.text(max_size=4), bool: st.booleans()}
    return simple[annotation]


def test_every_message_is_known_to_the_codec() -> None:
    defined = {
        kind.__name__
        for kind in vars(m).values()
        if isinstance(kind, type)
        and dataclasses.is_dataclass(kind)
        and kind.__module__.startswith(m.__name__)
    }
    values = {
        "GenerationId", "Fragment", "SlotInfo", "Source", "Member", "Link", "GenerationSpec", "Commit",
        "BusyWorker", "LayoutQuestion", "NodeTraits", "Strike", "Rewind", "StateId", "StateCopy",
        "RunFigures", "Adapted", "Judged", "NodeDrain", "StandingOrders", "Divergence",
        "HeldValues", "StepReplay", "ExpertLoads",
    }  # fmt: skip
    assert set(MESSAGES) == defined - values


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(sorted(MESSAGES)).flatmap(lambda name: strategy(MESSAGES[name])))
def test_messages_survive_json(message: Any) -> None:
    assert decode(json.loads(json.dumps(encode(message)))) == message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"type": "Nonsense"}, "not known"),
        ({"type": "NodeLost", "node": "a", "reason": "x", "extra": 1}, "extra"),
        ({"type": "UserRequest", "what": "explode"}, "explode"),
        ({"type": "NodeLost", "node": 3, "reason": "x"}, "expected str"),
    ],
)
def test_what_is_no_message_is_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decode(data)


def test_spec_survives_json_as_the_log_keeps_it() -> None:
    spec = World().up(("a", 2), ("b", 2))
    spec = dataclasses.replace(spec, layout=Layout(tp=2, dp=2), lineage=(m.Link(m.GenerationId(1, 1), 7),))
    assert decode_spec(json.loads(json.dumps(plain(spec)))) == spec


def recorded() -> list[str]:
    """The log of a small run with a death, a restart of the coordinator and an adoption."""
    lines = [header_line(job(), {"speed": 1.0})]

    class Recorder(World):
        def send(self, *events: m.Event) -> list[m.Command]:
            out: list[m.Command] = []
            for event in events:
                commands = super().send(event)
                lines.append(event_line(self.now, event, commands))
                out += commands
            return out

    world = Recorder()
    spec = world.up(("a", 4))
    world.now += 0.1
    dead = spec.members[1].worker
    commands = world.send(
        m.WorkerExited(dead, "killed"), *outcomes(spec, FailureKind.PEER_LOST, 5, but=(dead,))
    )
    after = world.run(world.answer(commands, flush(spec, 5, [0, 2, 3])))
    world.wait(2.5)
    again = Recorder(now=world.now)
    again.begin(("a", 4), term=2, running=after, workers=after.members, generations=(spec,))
    again.send(m.SnapshotSealed("a", after.id, 50, snapshot(after, 50)))
    return lines


def planner(config: JobConfig, header: dict[str, Any]) -> Any:
    assert header == {"speed": 1.0}
    assert config == job()
    return choose_dp, no_default


def test_a_log_replays_to_identical_commands() -> None:
    lines = recorded()
    result = replay(lines, planner)
    assert result.difference is None
    assert result.events == len(lines) - 1 > 20


def test_a_changed_command_or_time_is_noticed() -> None:
    lines = recorded()
    at = next(i for i, line in enumerate(lines) if '"Interrupt"' in line)
    changed = [*lines]
    changed[at] = lines[at].replace('"hard"', '"boundary"')
    difference = replay(changed, planner).difference
    assert difference is not None
    assert difference.line == at + 1
    assert "boundary" in str(difference)
    dropped = lines[:3] + lines[4:]
    assert replay(dropped, planner).difference is not None


def test_a_log_without_header_is_refused() -> None:
    with pytest.raises(ValueError, match="header"):
        replay(recorded()[1:], planner)
