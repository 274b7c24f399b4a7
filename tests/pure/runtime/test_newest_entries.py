"""Operations of a worker are cut to the room that there is: the newest stay, and all that wait."""

from __future__ import annotations

import json
from typing import Any

from picotron_ray.runtime.node_agent.evidence import newest_entries


def told(count: int, messages: int = 1) -> dict[str, Any]:
    """Operations of which every tenth is not done."""
    return {
        "entries": [{"number": number, "retired": number % 10 != 0} for number in range(count)],
        "messages": [{"number": number, "done": False} for number in range(messages)],
        "connections": [],
        "at_ns": 1,
    }


def test_what_fits_is_left_as_it_is() -> None:
    text = json.dumps(told(5))
    assert newest_entries(text, len(text)) == text


def test_the_newest_and_all_that_wait_stay() -> None:
    text = json.dumps(told(1000))
    cut = json.loads(newest_entries(text, len(text) // 3))
    numbers = [entry["number"] for entry in cut["entries"]]
    assert numbers[-1] == 999
    assert set(range(0, 1000, 10)) <= set(numbers)
    assert numbers == sorted(numbers)
    assert len(cut["messages"]) == 1, "a short list is not cut for a long one"
    assert cut["at_ns"] == 1


def test_little_room_leaves_little_but_json() -> None:
    text = json.dumps(told(1000, messages=1000))
    short = newest_entries(text, 200)
    assert len(short) <= 200
    assert json.loads(short)["at_ns"] == 1
    assert newest_entries('{"entries": [', 5) == '{"ent', "of what is no JSON the begin"
