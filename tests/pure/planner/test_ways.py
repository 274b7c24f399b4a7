"""Searches of offloading, precision and compressed gradients: all are valid jobs, the best is planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from picotron_ray.cli import app
from picotron_ray.config.load import load_job, parse_job
from picotron_ray.errors import ConfigError
from picotron_ray.planner.hardware import hardware
from picotron_ray.planner.plan import plan
from picotron_ray.planner.ways import GROUPS, groups_of, plan_of_ways

H100 = hardware("h100-80g")


def small(**more: Any) -> Any:
    return load_job("smollm-135m", ["data.path=unread", *(f"{key}={value}" for key, value in more.items())])


def test_the_best_way_is_no_slower_than_the_config_as_it_is() -> None:
    found = plan_of_ways(small(), 8, lambda precision: H100, list(GROUPS))
    plain = next(way for way in found.ways if not way.settings)
    assert plain.step_s == plan(small(), 8, H100, keep=1, buys=False).best.cost.total_s
    assert found.ways[0].step_s <= plain.step_s
    assert [way.step_s for way in found.ways] == sorted(way.step_s for way in found.ways)
    assert found.best.best.cost.total_s == found.ways[0].step_s
    assert found.tried >= len(found.ways) > 6


def test_each_way_is_what_its_keys_plan() -> None:
    found = plan_of_ways(small(), 8, lambda precision: H100, ["offload", "communication"])
    for way in found.ways[:4]:
        keys = [f"{key}={value}" for key, value in way.settings]
        job = load_job("smollm-135m", ["data.path=unread", *keys])
        assert plan(job, 8, H100, keep=1, buys=False).best.cost.total_s == pytest.approx(way.step_s)


def test_what_contradicts_the_config_is_left_out() -> None:
    """Compression keeps replicas whole, and an fp64 job takes none; A100s do not multiply in 8 bits."""
    zero = plan_of_ways(small(**{"layout.zero": 3}), 8, lambda precision: H100, ["communication"])
    assert [way.settings for way in zero.ways] == [()]
    wide = parse_job({"precision": "fp64", "cluster": {"device": "cpu"}})
    assert plan_of_ways(wide, 2, lambda precision: H100, ["communication"]).tried == 1
    a100 = plan_of_ways(small(), 8, lambda precision: hardware("a100-80g"), ["precision"])
    assert a100.tried == 1


def test_offloading_lets_a_model_fit() -> None:
    job = load_job("llama-3-70b", ["data.path=unread"])
    with pytest.raises(ConfigError, match=r"24 h100-80g would do; so would optimizer\.offload=true on 16"):
        plan(job, 16, H100)
    found = plan_of_ways(job, 16, lambda precision: H100, ["offload"])
    assert all(dict(way.settings) for way in found.ways)
    with pytest.raises(ConfigError, match="expected at least 147 GB"):
        plan_of_ways(job, 8, lambda precision: H100, ["offload"])


def test_groups_are_named() -> None:
    assert groups_of("offload, precision,offload") == ["offload", "precision"]
    with pytest.raises(ConfigError, match="--search: saw fast, expected some of offload, precision, comm"):
        groups_of("offload,fast")


def test_the_door_searches_ways(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = ["plan", "smollm-135m", "--gpus", "8", "--search", "communication", "--json", str(path)]
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    assert found.exit_code == 0
    value = json.loads(path.read_text())
    assert {"settings", "ways", "ways_tried"} <= value.keys()
    assert f"of {value['ways_tried']} ways to run it, the fastest:" in found.stdout
    refused = CliRunner().invoke(app, [*words[:6], "--goal", "memory"], catch_exceptions=False)
    assert refused.exit_code == 2
    assert refused.stderr.startswith("error: --search: saw it with --goal memory")
