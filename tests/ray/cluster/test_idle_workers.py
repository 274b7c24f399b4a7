"""Idle workers that a coordinator has not started: those alone are used that see the run's data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.runtime.coordinator.beginning import begin_event
from picotron_ray.runtime.ray_cluster.data_notes import leave_note, read_notes
from tests.support.runs.coordinator_parts import Nodes, view

HELLO: dict[str, Any] = {
    "workers": ["mine", "other", "early", "busy"],
    "busy": [("busy", 1, 2)],
    "data": {"mine": "aa", "other": "bb"},
    "spec": None,
}


def test_a_worker_leaves_a_note_of_the_data_that_it_sees(tmp_path: Path) -> None:
    leave_note(tmp_path, "mine", "aa")
    leave_note(tmp_path, "dead", "cc")
    assert read_notes(tmp_path, ["mine", "early"]) == {"mine": "aa"}


@pytest.mark.parametrize(("data", "taken"), [("aa", ["mine", "busy"]), ("", HELLO["workers"])])
def test_a_term_begins_without_idle_workers_that_see_other_data(data: str, taken: list[str]) -> None:
    """They are ended as strangers, and whoever is started in their place is refused by name."""
    begun = begin_event(2, (), (), {"n1": HELLO}, data=data)
    assert begun.workers == tuple(m.Member(worker, "n1") for worker in taken)


@pytest.mark.parametrize(("data", "idle"), [("aa", ("mine",)), ("", ("mine", "other", "early"))])
def test_a_node_that_is_heard_late_brings_no_idle_worker_that_sees_other_data(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, data: str, idle: tuple[str, ...]
) -> None:
    nodes = Nodes(monkeypatch)
    nodes.views, nodes.hello["a"], nodes.cluster.data = [view("a")], HELLO, data
    joined, *others = nodes.changes()
    assert joined == m.NodeJoined("a", 4, idle=idle)
    strangers = [worker for worker in HELLO["workers"] if worker not in idle]
    assert others == [m.WorkerReady(worker, "a") for worker in strangers], "the machine ends them"
    why = "worker other is not taken in: data.path: the files hold other samples: fingerprint bb, expected aa"
    assert (why in caplog.text) == bool(data)
