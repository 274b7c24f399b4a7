"""Replays of event logs: what is compared, what is skipped, and where a difference is said to be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.machine import Machine
from picotron_ray.coordinator.plan_book import no_default
from picotron_ray.coordinator.replay import event_line, header_line, part_header, replay
from tests.support.runs.coordinator_world import choose_dp, job


def recorded(terms: tuple[int, ...] = (1,)) -> list[str]:
    lines = [header_line(job(), {"device": "cpu", "b": 1, "a": 2})]
    for term in terms:
        machine, now = Machine(job(), choose_dp), 10.0 * term
        for event in (m.Begin(term), m.NodeJoined("a", 4), m.Tick()):
            lines.append(event_line(now, event, machine.handle(event, now)))
    return lines


def planner(config: Any, facts: dict[str, Any]) -> Any:
    assert (config, facts["device"]) == (job(), "cpu")
    return choose_dp, no_default


def test_lines_are_the_same_whatever_the_order_of_their_keys() -> None:
    head, begin, *_ = recorded()
    assert head.endswith(',"planner":{"a":2,"b":1,"device":"cpu"}}')
    assert begin.startswith('{"commands":[')
    assert begin.endswith(',"now":10.0}')


def test_logs_of_several_terms_replay_as_a_whole() -> None:
    lines = recorded((1, 2))
    lines.insert(2, " \n")
    found = replay(lines, planner)
    assert (found.events, found.difference) == (6, None)


def test_the_first_difference_is_told_by_its_line() -> None:
    lines = recorded()
    data = json.loads(lines[2])
    lines[2] = json.dumps({**data, "commands": data["commands"][:-1]})
    found = replay(lines, planner)
    assert found.difference is not None
    assert (found.events, found.difference.line) == (2, 3)
    assert found.difference.replayed == data["commands"]
    assert found.difference.recorded == data["commands"][:-1]
    assert str(found.difference) == (
        f"line 3: recorded {found.difference.recorded}, replayed {found.difference.replayed}"
    )


@pytest.mark.parametrize("lines", [[], ["[]"], ['{"planner": {}}']])
def test_a_log_without_a_job_is_refused(lines: list[str]) -> None:
    with pytest.raises(ValueError, match="the first line is not a header with the job"):
        replay(lines, planner)


def test_parts_of_a_log_replay_in_order_and_no_part_alone() -> None:
    """What the machine knew when a part began is in those before it."""
    head, *lines = recorded((1, 2))
    parts = [[head, *lines[:2]], [part_header(head, 1), *lines[2:4]], [part_header(head, 2), *lines[4:]]]
    found = replay([line for part in parts for line in part], planner)
    assert (found.events, found.difference) == (6, None)
    with pytest.raises(ValueError, match="saw part 1 where part 0 was expected"):
        replay(parts[1], planner)
    with pytest.raises(ValueError, match=r"saw part 2 where part 1 was expected: .* in order"):
        replay([*parts[0], *parts[2]], planner)
