"""The tracer of a config's way: its definitions, on records that are made up."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from tests.support.house import trace_job
from tests.support.house.trace_job import (
    GIVE,
    HAND_OVER,
    TAKE,
    Event,
    Move,
    Place,
    Recorder,
    events_of,
    is_config,
    moves,
    way,
)


@dataclass(frozen=True)
class Record:
    """A frozen record, as a resolved job is."""

    job: Any


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (JobConfig(), True),
        ({"model": {}, "data": {}, "steps": 3}, True),
        ((JobConfig(), "a note"), True),
        (Record(JobConfig()), True),
        ({"model": {}}, False),
        ("tiny", False),
        (((JobConfig(),),), False),
    ],
)
def test_a_config_and_what_holds_one(value: Any, expected: bool) -> None:
    assert is_config(value) is expected


def test_generators_are_taken_once(tmp_path: Path) -> None:
    """Going on with a generator is no second call."""
    recorder = Recorder(tmp_path, str(Path(__file__).parent))

    def rules(job: JobConfig) -> Any:
        yield 1
        yield 2

    sys.setprofile(recorder)
    try:
        list(rules(JobConfig()))
    finally:
        sys.setprofile(None)
        recorder.close()
    lines = [json.loads(line) for line in next(tmp_path.iterdir()).read_text().splitlines()]
    assert [line["what"] for line in lines] == [TAKE]


def written(folder: Path, *events: tuple[str, str]) -> Path:
    """A record from (what, stack as words, innermost first); a word's file is its part before the dot."""
    path = folder / "1.jsonl"
    with path.open("w") as file:
        for what, words in events:
            stack = [(word.split(".")[0], word.split(".")[1], hash(word)) for word in words.split()]
            file.write(json.dumps({"what": what, "thread": 1, "stack": stack}) + "\n")
    return path


def test_the_way_is_what_leads_on(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        (GIVE, "load.read main.train"),
        (TAKE, "driver.drive main.train"),
        (TAKE, "paths.user driver.drive main.train"),
        (GIVE, "paths.user driver.drive main.train"),
        (TAKE, "check.rules driver.drive main.train"),
        (TAKE, "paths.user driver.drive main.train"),
        (GIVE, "paths.user driver.drive main.train"),
        (HAND_OVER, "driver.start driver.drive main.train"),
        (TAKE, "late.look driver.drive main.train"),
    )
    found = moves(way(events_of(path)))
    assert [(move.file, move.up) for move in found] == [
        ("load", False),
        ("main", False),
        ("driver", False),
        ("paths", False),
        ("driver", True),
        ("paths", True),
        ("driver", True),
    ]
    assert found[1] == Move("main", "back in train()", False)


def test_a_look_whose_frame_is_used_again_lies_beside_the_way(tmp_path: Path) -> None:
    """Python gives the frame of a call that is over to the next one."""
    stacks = [("look", 7), ("start", 7)]
    events = [Event(TAKE, 1, (Place("actor", "init", 1),))]
    events += [
        Event(TAKE, 1, (Place(name, name, frame), Place("actor", "init", 1))) for name, frame in stacks
    ]
    events.append(Event(HAND_OVER, 1, events[-1].stack))
    assert [move.file for move in moves(way(events))] == ["actor", "start"]


def test_a_process_that_hands_nothing_on_is_beside_the_way(tmp_path: Path) -> None:
    agent = written(tmp_path, (TAKE, "agent.Agent"), (TAKE, "cleanup.claim agent.Agent"))
    assert events_of(agent) == []


@pytest.mark.parametrize("function", ["start_agent", "start_worker"])
def test_only_a_worker_ends_the_coordinators_part(tmp_path: Path, function: str) -> None:
    path = written(tmp_path, (TAKE, "actor.init"), (HAND_OVER, f"actors.{function}"), (TAKE, "x.y"))
    assert len(events_of(path)) == (2 if function == "start_worker" else 0)


def test_every_definition_is_written_down() -> None:
    assert trace_job.__doc__ is not None
    for word in ("*config*", "*passes*", "*way*", "*beside*", "*step back up*"):
        assert word in trace_job.__doc__
