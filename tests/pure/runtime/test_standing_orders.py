"""Orders of operators and pauses in a run's record: what a later term hears, and what the summary counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.resting import RESTS
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.coordinator.launch_limit import left
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.driver import run_orders
from picotron_ray.runtime.driver.time_left import check_deadline

JOB = parse_job({"name": "night"})
SPEC = m.GenerationSpec(m.GenerationId(1, 1), (m.Member("w", "n"),), Layout(), m.Source("init", 0), "")


def answer(what: str, accepted: bool = True, **data: Any) -> m.Alert:
    return m.Alert("info", what, "order", {"order": what, "accepted": accepted, **data})


def heard(record: RunRecord, at_s: float, *commands: m.Command, event: m.Event | None = None) -> None:
    record.observe(event or m.Tick(), list(commands), at_s)


def recalled(record: RunRecord, launch: str) -> RunRecord:
    """The record of the next term."""
    found = RunRecord(JOB)
    found.recall(record.memo(), (), launch)
    return found


def test_orders_hold_for_the_launch_that_was_told_them() -> None:
    record = RunRecord(JOB)
    record.recall(None, (), "one")
    heard(record, 100.0, answer("pause"), answer("resize", min_workers=1, max_workers=2))
    heard(record, 100.0, answer("drain", node="a", left_s=0.0), answer("drain", False, node="b", left_s=0.0))
    orders = m.StandingOrders(True, 1, 2, (m.NodeDrain("a"),))
    assert record.past()["standing"] == orders
    assert recalled(record, "one").past()["standing"] == orders
    assert recalled(record, "two").past()["standing"] == m.NO_ORDERS
    heard(record, 101.0, answer("resume"))
    assert not recalled(record, "one").past()["standing"].paused


def test_a_pause_is_counted_and_the_ends_of_its_workers_are_no_failures() -> None:
    record = RunRecord(JOB)
    began_s = record.status(0)["began_s"]
    heard(record, began_s, m.RunGeneration(SPEC))
    heard(record, began_s + 10, m.Alert("info", "paused", "paused"), m.KillWorker("w", RESTS))
    heard(record, began_s + 11, event=m.WorkerExited("w", "killed"))
    heard(record, began_s + 40, answer("resume"))
    summary = record.summary(m.Finish("stopped", again=True))
    assert (summary["paused_s"], summary["requeue"], summary["failures"]) == (30.0, True, [])
    assert summary["seconds"]["paused"] == pytest.approx(30.0)
    assert recalled(record, "").summary(m.Finish("stopped"))["paused_s"] == 30.0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {}),
        ({"max_wall_s": 60.0}, {"left_s": 50.0, "limit": "cluster.max_wall_s"}),
        ({"deadline": "1970-01-01T00:02:00Z"}, {"left_s": 10.0, "limit": "cluster.deadline"}),
        (
            {"deadline": "1970-01-01T00:02:00Z", "max_wall_s": 15.0},
            {"left_s": 5.0, "limit": "cluster.max_wall_s"},
        ),
    ],
)
def test_what_is_left_of_a_launch(keys: dict[str, Any], expected: dict[str, Any]) -> None:
    assert left(parse_job({"cluster": keys}).cluster, 100.0, 110.0) == expected


@pytest.mark.parametrize("deadline", ["2027-01-31T08:00:00", "tomorrow", "2027-01-31"])
def test_a_deadline_without_a_zone_is_refused(deadline: str) -> None:
    with pytest.raises(
        ConfigError, match=r"cluster\.deadline: saw .*, expected an absolute time with a zone"
    ):
        parse_job({"cluster": {"deadline": deadline}})


def test_a_deadline_that_has_passed_is_refused() -> None:
    check_deadline(None)
    later = (datetime.now(UTC) + timedelta(hours=1)).isoformat(timespec="seconds")
    check_deadline(parse_job({"cluster": {"deadline": later}}).cluster.deadline)
    with pytest.raises(ConfigError, match=r"which passed \d+ d( \d+ h)? ago|which passed [\d.]+ years ago"):
        check_deadline("2026-01-01T00:00:00Z")
    with pytest.raises(ConfigError, match="day is out of range"):
        check_deadline("2027-02-30T00:00:00Z")


class Door:
    """A coordinator's answers to orders, one after the other."""

    def __init__(self, patch: pytest.MonkeyPatch, *answers: dict[str, Any] | None) -> None:
        self.answers, self.asked = list(answers), []  # type: ignore[var-annotated]
        patch.setattr(run_orders, "connect_to_run", lambda run: (self, None))
        patch.setattr(run_orders.follow_run, "poll", lambda coordinator, since: {"term": 3, "done": False})
        patch.setattr(run_orders.follow_run, "ask", self._ask)
        patch.setattr(run_orders.time, "sleep", lambda seconds: None)

    def _ask(self, coordinator: object, method: str, *words: Any) -> dict[str, Any] | None:
        self.asked.append((method, *words))
        return self.answers.pop(0)


def test_an_order_is_given_until_it_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    again = {"accepted": False, "again": True, "text": "it was meant for term 2"}
    door = Door(
        monkeypatch, None, again, {"accepted": True, "again": False, "text": "resize: 1 to 2 workers"}
    )
    assert run_orders.resize("night", most=2)["text"] == "resize: 1 to 2 workers"
    assert door.asked[-1] == ("order", 3, {"what": "resize", "min_workers": 0, "max_workers": 2})
    assert len(door.asked) == 3


def test_a_refusal_is_one_line_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    Door(monkeypatch, {"accepted": False, "again": False, "text": "drain refused: node a is the last one"})
    with pytest.raises(ConfigError, match=r"^run night: drain refused: node a is the last one$"):
        run_orders.drain("night", "a")


@pytest.mark.parametrize(("least", "most"), [(None, None), (0, None), (None, -1)])
def test_a_size_that_is_none_is_refused_before_anybody_is_asked(least: int | None, most: int | None) -> None:
    with pytest.raises(ConfigError, match="resize: saw"):
        run_orders.resize("night", least, most)
