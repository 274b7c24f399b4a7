"""Whether a run trains, so that tools may look at its steps: its generation says it, and nobody else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.coordinator.messages import GenerationId
from picotron_ray.errors import ConfigError
from picotron_ray.runtime.driver import breakpoints, follow_run, recordings, run_agents
from picotron_ray.runtime.driver.tool_orders import RunTools

PAGES = {
    "w0": {"step": 50, "term": 1, "n": 2, "phase": "forward"},
    "w1": {"step": 50, "term": 1, "n": 2, "phase": "backward"},
}
SPARE = {"step": 0, "term": 0, "n": 0, "phase": "idle"}


def spec(n: int) -> Any:
    return SimpleNamespace(id=GenerationId(1, n))


def running(told: Mapping[str, Any], pages: Mapping[str, Any] = PAGES, state: str = "running") -> Any:
    tools = RunTools.__new__(RunTools)
    tools.run = "night"
    tools.status = {"pages": dict(pages), "generation": "1.2", "state": state}
    tools._call = lambda calls: {node: told[node] for node in calls if node in told}  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run_agents, "agent_nodes", lambda run: list(told))
        return tools._running_spec()


def test_idle_workers_and_nodes_that_were_left_out_say_nothing_of_it() -> None:
    assert running({"a": spec(2)}, {**PAGES, "w2": SPARE}).id == GenerationId(1, 2)
    assert running({"left out": spec(1), "silent": None, "a": spec(2)}).id == GenerationId(1, 2)


@pytest.mark.parametrize(
    ("told", "pages"),
    [
        ({"a": spec(1)}, PAGES),
        ({}, PAGES),
        ({"a": spec(2)}, {}),
        ({"a": spec(2)}, {**PAGES, "w1": {**PAGES["w1"], "phase": "restore"}}),
    ],
)
def test_a_run_that_starts_or_recovers_is_refused(told: dict[str, Any], pages: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="does not train now"):
        running(told, pages)


def test_a_held_run_is_not_recorded() -> None:
    tools = RunTools.__new__(RunTools)
    tools.run, tools.status = "night", {"pages": {"w0": {"phase": "hold"}, "w1": {"phase": "sync"}}}
    with pytest.raises(ConfigError, match=r"'night' is held after its step.*debug continue night` first"):
        recordings.record(tools, (0,), {})


@pytest.mark.parametrize("text", ["2", "all", "0,1", "-1", ""])
def test_where_one_rank_is_taken_no_list_of_them_is_expected(text: str) -> None:
    tools = RunTools.__new__(RunTools)
    tools.spec = SimpleNamespace(members=("a", "b"))  # type: ignore[assignment]
    assert tools.one_rank("1", "--rank") == 1
    with pytest.raises(ConfigError, match=rf"^--rank: saw '{text}', expected one rank from 0 to 1$"):
        tools.one_rank(text, "--rank")


def test_a_trace_of_no_steps_is_refused_by_its_own_option(tmp_path: Path) -> None:
    """It has no --active."""
    with pytest.raises(ConfigError, match=r"^--steps: saw 0, expected from 1 to 1000 steps$"):
        breakpoints.trace("night", "call", 0, "", tmp_path, print)


def test_of_a_paused_run_it_is_said_what_ends_that() -> None:
    with pytest.raises(ConfigError, match="is paused; `picotron-ray resume night` ends that"):
        running({"a": spec(2)}, state="paused")


def test_a_stop_is_told_until_somebody_has_heard_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page said that the run stops, and the call was lost with the coordinator."""
    answers = iter([False, False, True])
    asked: list[str] = []
    monkeypatch.setattr(follow_run, "heard", lambda coordinator, what: asked.append(what) or next(answers))
    monkeypatch.setattr(follow_run, "POLL_S", 0.0)
    follow_run.tell(None, "night", "stop")
    assert asked == ["stop"] * 3
    monkeypatch.setattr(follow_run, "heard", lambda coordinator, what: False)
    with pytest.raises(follow_run.LostRunError, match="nobody heard of the stop"):
        follow_run.tell(None, "night", "stop", patience_s=0.0)
