"""A live run is followed with little asked of its coordinator, over a new term, silence and its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.errors import ConfigError
from picotron_ray.runtime.dashboard import live, sources, watch
from picotron_ray.runtime.dashboard.live import LiveSource
from picotron_ray.runtime.dashboard.sections import findings
from picotron_ray.runtime.dashboard.watch import Watch
from picotron_ray.runtime.driver import follow_run
from tests.support.runs.page_facts import store_run

FINDING = {
    "rule": "straggler", "where": "rank 1", "said": "it is slow", "advice": "look at its node",
    "severity": "critical", "since_s": 7.0,
}  # fmt: skip


class Coordinator:
    """Answers of a run of so many workers."""

    def __init__(self, workers: int = 2) -> None:
        self.members = [f"w1-{rank}" for rank in range(workers)]
        self.step, self.term, self.continues, self.done, self.silent = 5, 1, False, False, False
        self.events = [self.event(1), self.event(2)]
        self.asked: list[tuple[str, Any]] = []

    def event(self, seq: int) -> dict[str, Any]:
        return {
            "seq": seq,
            "t": 1.0,
            "level": "info",
            "kind": "join",
            "text": f"{self.term}/{seq}",
            "data": {},
        }

    def poll(self, _: Any, since: int, timeout_s: float = 0.0, follower: str = "") -> dict[str, Any] | None:
        self.asked.append(("status", since))
        many = bool(follower) and len(self.members) > live.FEW
        pages = {
            name: {"step": self.step, "node": f"n{name}"} for name in self.members[: 1 if many else None]
        }
        return None if self.silent else {
            "run": "told", "state": "finished" if self.done else "running", "done": self.done,
            "term": self.term, "continues": self.continues, "generation": "1.1", "members": self.members,
            "layout": f"dp{len(self.members)}-tp1-pp1-mb1", "step": self.step, "steps": 9, "loss": 2.0,
            "tokens_per_s": 10.0, "eval_step": 3, "eval_loss": 2.5, "committed": None, "pages": pages,
            "events": [one for one in self.events if one["seq"] > since], "failures": [], "telemetry": None,
            "metrics": None, "began_s": 1.0,
        }  # fmt: skip

    def ask(self, coordinator: Any, method: str, *words: Any, timeout_s: float = 0.0) -> Any:
        self.asked.append((method, words))
        told = {"status": lambda: self.poll(coordinator, *words), "alerts": lambda: {"firing": [FINDING]}}
        return told.get(method, dict)()


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    return Coordinator()


@pytest.fixture
def run(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveSource]:
    monkeypatch.setattr(follow_run, "poll", coordinator.poll)
    monkeypatch.setattr(follow_run, "ask", coordinator.ask)
    found = LiveSource("told", object(), None)
    yield found
    found.close()


def texts(run: LiveSource) -> list[str]:
    facts = run.look()
    assert facts is not None
    return [event["text"] for event in facts.status["events"]]


def test_events_are_asked_for_once_and_kept(run: LiveSource, coordinator: Coordinator) -> None:
    assert texts(run) == ["1/1", "1/2"]
    coordinator.events.append(coordinator.event(3))
    assert texts(run) == ["1/1", "1/2", "1/3"]
    assert [since for what, since in coordinator.asked if what == "status"][-1] == 2


def test_a_new_term_that_begins_anew_has_its_own_events(run: LiveSource, coordinator: Coordinator) -> None:
    texts(run)
    coordinator.term = 2
    coordinator.events = [coordinator.event(1)]
    assert texts(run) == ["2/1"]
    coordinator.term, coordinator.continues = 3, True
    coordinator.events.append(coordinator.event(2))
    assert texts(run) == ["2/1", "3/2"]


def test_of_many_workers_all_pages_are_asked_for_seldom(coordinator: Coordinator, run: LiveSource) -> None:
    coordinator.members = [f"w1-{rank}" for rank in range(4096)]
    for _ in range(3):
        facts = run.look()
        assert facts is not None
        assert len(facts.status["pages"]) == 4096
        assert facts.nodes[4095] == "nw1-4095"
    assert sum(what == "status" and isinstance(words, tuple) for what, words in coordinator.asked) == 1


def test_what_fires_is_the_first_finding(run: LiveSource, coordinator: Coordinator) -> None:
    facts = run.look()
    assert facts is not None
    first = next(iter(findings(facts)))
    assert (first["level"], first["t"]) == ("critical", 7.0)
    assert first["text"] == "straggler (rank 1): it is slow; look at its node"


def test_a_run_that_went_back_loses_the_steps_that_are_void(
    run: LiveSource, coordinator: Coordinator
) -> None:
    run.look()
    coordinator.step = 4
    facts = run.look()
    assert facts is not None
    assert facts.curves.shown("loss") == [[4, 2.0]]


def test_storage_that_hangs_keeps_no_look_waiting(
    run: LiveSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hangs, storage = threading.Event(), store_run(tmp_path)
    monkeypatch.setattr(live, "FIRST_S", 0.1)
    monkeypatch.setattr(live.JobConfig, "model_validate", lambda config: hangs.wait(20))
    monkeypatch.setattr(live.find_stored, "storage_of", lambda job: storage)
    began_s = time.monotonic()
    facts = run.look()
    assert facts is not None
    assert time.monotonic() - began_s < 2
    assert list(facts.generations) == []
    hangs.set()
    assert run._reading is not None
    run._reading.join(10)
    facts = run.look()
    assert facts is not None
    assert len(facts.generations) == 2


def test_a_page_goes_over_to_storage_when_the_run_ends(
    run: LiveSource, coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = store_run(tmp_path)
    left: list[bool] = []
    monkeypatch.setattr(sources, "find", lambda word: run)
    monkeypatch.setattr(sources.find_stored, "of_name", lambda name: storage)
    monkeypatch.setattr(watch.follow_run, "disconnect", lambda: left.append(True))
    page = Watch("told")
    assert page.sections()["head"]["source"] == "live"
    coordinator.silent = True
    monkeypatch.setattr(follow_run, "is_gone", lambda *words: False)
    page._look()
    assert page.sections()["head"]["notes"] == ["the coordinator does not answer; it may be restarting"]
    coordinator.silent, coordinator.done = False, True
    page._look()
    assert (page.sections()["head"]["source"], page.sections()["head"]["state"]) == ("storage", "cut-off")
    assert (page.live, left) == (None, [True])
    with pytest.raises(ConfigError, match="does not go on here"):
        page.press("stop", {})
    page.close()
