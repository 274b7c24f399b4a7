"""What messages quote: values, allowed values and the keys that were meant."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.config.export import flatten, public_dict
from picotron_ray.config.json_schema import allowed, key_schemas, schema_key
from picotron_ray.config.load import load_job, parse_job
from picotron_ray.config.mistake_lines import dotted, shown
from picotron_ray.config.resume import check_resume, show
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (1.5, "1.5"),
        ("a", "'a'"),
        ("a  b", "'a b'"),
        ({"a": 1}, "a mapping"),
        ((1, 2), "a list of 2"),
        (10**79, "1" + "0" * 79),
        (10**80, "1" + "0" * 76 + "..."),
    ],
)
def test_values(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "an integer"),
        ({"type": "integer", "minimum": 1, "maximum": 9}, "an integer >= 1 and <= 9"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-9}, "a number > 0 and < 1e-09"),
        ({"type": "number", "minimum": 1.0}, "a number >= 1"),
        (
            {"anyOf": [{"const": "auto"}, {"type": "boolean"}, {"type": "null"}]},
            "auto or true or false or null",
        ),
        ({"enum": ["a", 2]}, "one of a, 2"),
        ({"type": "string", "pattern": "^a$"}, "a string that matches ^a$"),
        ({"type": "array"}, "a list"),
        ({"$ref": "#/x"}, "a mapping of keys"),
    ],
)
def test_allowed_values(schema: dict[str, Any], text: str) -> None:
    assert allowed(schema) == text


def test_keys_of_sections_lists_and_their_items() -> None:
    schemas = key_schemas()
    assert allowed(schemas["model"]) == allowed(schemas["model.moe"]) == "a mapping of keys"
    assert allowed(schemas["chaos"]) == "a list"
    assert {"model.moe.top_k", "chaos.*.step"} <= schemas.keys()
    assert "chaos.step" not in schemas
    assert schema_key(("chaos", 0, "step")) == "chaos.*.step"
    assert dotted(("chaos", 0, "step")) == "chaos.0.step"
    assert flatten({"a": {"b": 1, "c": {"d": [1]}}, "e": None}) == {"a.b": 1, "a.c.d": [1], "e": None}


def test_values_may_be_nested_twenty_deep() -> None:
    def line(depth: int) -> str:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        with pytest.raises(ConfigError) as caught:
            parse_job({"name": value})
        return str(caught.value)

    assert line(19).startswith("name: saw a list of 1, expected a string")
    assert line(20) == "config: saw values nested more than 20 deep, expected at most 3; remove the alias"


def test_a_resumes_values_are_cut_to_sixty() -> None:
    assert show("x" * 58) == repr("x" * 58)
    assert show("x" * 59) == "'" + "x" * 56 + "..."


def test_a_broken_fault_breaks_no_rule_of_the_shortest_run() -> None:
    with pytest.raises(ConfigError) as caught:
        load_job("tiny", ["steps=1", "chaos=[{fault: kil, target: coordinator, step: 1}]"])
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith("chaos.0.fault: saw 'kil', expected one of")
    assert caught.value.problems[0].endswith(", did you mean kill?")


def test_slot_folders_that_launch_exchanged_are_no_change() -> None:
    """The record of a run that took to its overflow folder names the two the other way round."""

    def folders(*of: str) -> JobConfig:
        keys = ("snapshot.folder", "snapshot.overflow_folder")
        return load_job("tiny", [f"{key}={name}" for key, name in zip(keys, of, strict=False)])

    assert check_resume(public_dict(folders("/disk", "/memory")), folders("/memory", "/disk")) == []
    told = check_resume(public_dict(folders("/disk", "/memory")), folders("/memory", "/other"))
    assert [line.split(":")[0] for line in told] == ["snapshot.folder", "snapshot.overflow_folder"]
    told = check_resume(public_dict(folders("/memory", "/disk")), folders("/memory"))
    assert told == ["snapshot.overflow_folder: was '/disk', now not set; accepted"]
