"""What the summary says of failures, from the events that the coordinator handles."""

from __future__ import annotations

import time
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator.run_record import RunRecord
from tests.support.runs.coordinator_world import job

BEGAN = 1_000_000.0


class Run:
    """Generations of workers ``a``, ``b``, … on one node, told to a record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time, "time", lambda: BEGAN)
        self.record = RunRecord(job())
        self.spec: m.GenerationSpec

    def generation(self, n: int, workers: str, step: int, at_s: float, source: Any = "slots") -> None:
        members = tuple(m.Member(worker, "node") for worker in workers)
        layout = Layout(dp=len(workers))
        self.spec = m.GenerationSpec(m.GenerationId(1, n), members, layout, m.Source(source, step), "test")
        self.record.observe(m.Tick(), [m.RunGeneration(self.spec)], BEGAN + at_s)

    def tell(self, at_s: float, *events: m.Event) -> None:
        for event in events:
            self.record.observe(event, [], BEGAN + at_s)

    def outcome(
        self, worker: str, step: int, first_step_at_s: float = 0.0, kind: Any = FailureKind.PEER_LOST
    ) -> m.Outcome:
        at_s = BEGAN + first_step_at_s if first_step_at_s else 0.0
        return m.Outcome(worker, self.spec.id, kind, step, "", at_s)

    def failures(self) -> list[dict[str, Any]]:
        return list(self.record.status(0)["failures"])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


def test_every_failure_is_kept_though_no_heartbeat_came_between(run: Run) -> None:
    run.generation(1, "abc", 0, 1.0, "init")
    run.tell(2.0, m.WorkerExited("a", "process died"), run.outcome("b", 7, 1.5), run.outcome("c", 7, 1.5))
    run.generation(2, "bc", 7, 2.1)
    run.tell(3.0, m.WorkerExited("b", "process died"), run.outcome("c", 11, 2.4))
    run.tell(3.0, m.WorkerExited("a", "process gone"))  # the agent's word on the first comes late
    run.generation(3, "c", 10, 3.1)
    run.tell(4.0, m.Heartbeat("node", run.spec.id, {"c": 12}))
    first, second = run.failures()
    assert (first["kind"], first["target"], first["step"], first["lost_steps"]) == (
        "worker-exited",
        "a",
        7,
        0,
    )
    assert first["recovered_s"] == pytest.approx(0.4)
    assert (second["target"], second["step"], second["lost_steps"]) == ("b", 11, 1)
    assert second["recovered_s"] == pytest.approx(1.0)


def test_a_fault_in_the_recovery_is_a_failure_of_its_own(run: Run) -> None:
    run.generation(1, "abc", 0, 1.0, "init")
    run.tell(2.0, m.WorkerExited("a", "process died"), run.outcome("b", 7, 1.5), run.outcome("c", 7, 1.5))
    run.generation(2, "bc", 7, 2.1)
    run.tell(2.2, m.WorkerExited("b", "process died"), run.outcome("c", 7))
    run.generation(3, "c", 7, 2.3)
    run.tell(3.0, m.Heartbeat("node", run.spec.id, {"c": 7}))
    assert [failure["recovered_s"] for failure in run.failures()] == [None, None]
    run.tell(4.0, m.Heartbeat("node", run.spec.id, {"c": 8}))
    assert [failure["target"] for failure in run.failures()] == ["a", "b"]
    assert [failure["lost_steps"] for failure in run.failures()] == [0, 0]
    assert [failure["recovered_s"] for failure in run.failures()] == pytest.approx([2.0, 1.8])


def test_the_gravest_sign_names_a_failure(run: Run) -> None:
    run.generation(1, "ab", 0, 1.0, "init")
    run.tell(
        2.0, run.outcome("b", 5), m.WorkerExited("a", "killed"), m.Stalled("a", run.spec.id, "reduce", 1.0)
    )
    (failure,) = run.failures()
    assert (failure["kind"], failure["target"]) == ("hang", "a")


def test_an_outcome_of_an_older_generation_says_nothing(run: Run) -> None:
    run.generation(1, "ab", 0, 1.0, "init")
    old = run.outcome("b", 5)
    run.generation(2, "ab", 5, 2.0)
    run.tell(2.1, old)
    assert run.failures() == []
