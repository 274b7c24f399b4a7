"""Nothing that users rely on is missing or renamed since 03561a3; additions are listed.

A name that was added goes into the second part of interface.json, under ``added``; a default that is another
now into the third, under ``changed``, with what it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.house import interface
from tests.support.runs.small_run import summary

KEPT: dict[str, Any] = json.loads(Path(__file__).with_name("interface.json").read_text())
OLD, ADDED, CHANGED = KEPT["03561a3"], KEPT["added"], KEPT["changed"]
TAKES = " takes "


def value_of(line: str) -> tuple[str, Any] | None:
    """Key and value of a line ``key takes VALUE``; None of other lines."""
    key, takes, text = line.partition(TAKES)
    return (key, json.loads(text)) if takes and not text.startswith("any ") else None


def missing(section: str, now: list[str]) -> list[str]:
    """Old names that are no longer there; a value of a key is there where a config that holds it is valid."""
    lost = [line for line in OLD[section] if CHANGED.get(line, line) not in now]
    return [line for line in lost if (value := value_of(line)) is None or not interface.accepts(*value)]


def unlisted(section: str, now: list[str]) -> list[str]:
    """New names that are not in the list of additions, and listed ones that are not there."""
    new = [line for line in now if line not in OLD[section]]
    return sorted(set(new) ^ set(ADDED[section]))


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    found = {name: list(dict.fromkeys(lines())) for name, lines in interface.SECTIONS.items()}
    return {**found, "summary": list(dict.fromkeys(interface.paths(summary(tmp_path_factory.mktemp("run")))))}


def test_every_section_is_kept(now: dict[str, list[str]]) -> None:
    assert OLD.keys() == ADDED.keys() == now.keys()
    assert all(OLD.values())


def test_defaults_alone_have_changed() -> None:
    for was, is_now in CHANGED.items():
        key, _, value = is_now.partition(" default ")
        assert was in OLD["config"]
        assert was.startswith(f"{key} default ")
        assert value


@pytest.mark.parametrize("section", OLD)
def test_nothing_is_missing(section: str, now: dict[str, list[str]]) -> None:
    assert missing(section, now[section]) == []


@pytest.mark.parametrize("section", OLD)
def test_additions_are_listed(section: str, now: dict[str, list[str]]) -> None:
    assert unlisted(section, now[section]) == []


VALUES = [value for line in OLD["config"] if (value := value_of(line))]


def test_every_old_value_is_accepted() -> None:
    assert [value for value in VALUES if not interface.accepts(*value)] == []


@pytest.mark.parametrize("section", OLD)
def test_a_name_that_is_gone_is_noticed(section: str, now: dict[str, list[str]]) -> None:
    """Each name of each section, left out and renamed in turn; values by name are judged by validation."""
    for line in OLD[section]:
        if value_of(line) is None and line not in CHANGED:
            others = [name for name in now[section] if name != line]
            assert missing(section, others) == [line]
            assert unlisted(section, [*others, line + "2"]) == sorted([line + "2"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layout.schedule", "afab2"),
        ("layout.schedule2", "afab"),
        ("precision", "fp4"),
        ("optimizer.clip_norm", "none"),
        ("trackers.*.kind", "excel"),
        ("chaos.*.fault", None),
    ],
)
def test_a_value_that_is_refused_is_noticed(key: str, value: Any) -> None:
    assert not interface.accepts(key, value)
