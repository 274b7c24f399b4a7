"""Alerts of a run's coordinator: findings become events, messages and requests, and never hurt it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from picotron_ray.config.schema.alerts import ALERT_RULES
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.rule_findings import RULE_ACT
from picotron_ray.layout.layout import Layout
from picotron_ray.observability.rank_table import SlowRank
from picotron_ray.observability.windows import TelemetryWindow
from picotron_ray.runtime.coordinator.alert_service import MOST_WAITING, AlertCalls, AlertService
from picotron_ray.runtime.coordinator.run_record import RunRecord
from picotron_ray.runtime.coordinator.telemetry import open_telemetry
from picotron_ray.runtime.driver.run_alerts import alert_lines, rule_rows

ACT = {"act": [{"rule": "straggler", "do": "quarantine"}, {"rule": "nan", "do": "rewind"}]}


class Notes:
    """Stand-in of a record: what was noted."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def note(self, *words: Any) -> None:
        self.told.append(words)


def spec_of(ranks: int) -> m.GenerationSpec:
    members = tuple(m.Member(f"w1-{rank}", f"node{rank}") for rank in range(ranks))
    return m.GenerationSpec(m.GenerationId(1, 1), members, Layout(dp=ranks), m.Source("init"), "start")


def window(number: int, slow: tuple[SlowRank, ...] = (), **figures: float) -> TelemetryWindow:
    return TelemetryWindow(1e9 + number, "1.1", {"step": 10.0 * number, **figures}, slow)


def service(notes: Notes, **alerts: Any) -> AlertService:
    made = AlertService(JobConfig.model_validate({"alerts": alerts}), notes, "cpu")  # type: ignore[arg-type]
    made.spec = spec_of(4)
    return made


def until(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20.0
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def fed(made: AlertService, *windows: TelemetryWindow) -> None:
    """Hand windows over as slowly as they are judged."""
    for one in windows:
        before = made.status()["windows"]
        made.take(one)
        until(lambda before=before: made.status()["windows"] > before)
    until(lambda: not made._busy)


def test_a_finding_is_an_event_and_asks_for_what_the_config_says() -> None:
    notes = Notes()
    made = service(notes, **ACT)
    slow = (SlowRank(2, 0.2, 1.8, "forward", 0.1),)
    fed(made, *(window(n, slow, straggler_ratio=1.8) for n in range(6)))
    ((level, kind, text, data),) = notes.told
    assert (level, kind) == ("warning", "alert")
    assert text.startswith("straggler (rank 2 on node node2): ")
    assert data["evidence"] == {"straggler_ratio": 1.8, "threshold": 1.3}
    (asked,) = made.asked()
    assert (asked.act, asked.node, asked.generation) == ("quarantine", "node2", m.GenerationId(1, 1))
    assert made.asked() == []
    fed(made, *(window(10 + n, straggler_ratio=1.0) for n in range(6)))
    assert [each[0] for each in notes.told] == ["warning", "info"]
    status = made.status()
    assert (status["firing"], len(status["resolved"])) == ([], 1)
    assert "over: straggler" in "\n".join(alert_lines({"run": "x", **status}, True))
    made.finish(1.0)


def test_a_finding_asks_again_until_the_machine_has_done_something(tmp_path: Path) -> None:
    job = JobConfig.model_validate({"alerts": ACT, "storage": {"url": str(tmp_path)}})
    run = open_telemetry(job, RunRecord(job), lambda: True, "cpu")
    made = run.alerts
    assert made is not None
    made.spec = spec_of(4)
    slow = (SlowRank(2, 0.2, 1.8, "forward", 0.1),)

    def asked(seconds: int) -> list[m.RuleFinding]:
        fed(made, *(window(seconds + n, slow, straggler_ratio=1.8) for n in range(5)))
        return made.asked()

    def answer(done: bool) -> None:
        data = {"rule": "straggler", "act": "quarantine", "done": done, "step": 1, "why": "room"}
        run.observe(m.Tick(), None, [m.Alert("info", "", RULE_ACT, data)])

    (first,) = asked(0)
    answer(False)
    assert asked(100) == []
    assert asked(200) == [first]
    answer(True)
    assert asked(1000) == []
    made.finish(1.0)


def test_the_bad_step_itself_is_what_a_rewind_is_asked_for() -> None:
    notes = Notes()
    made = service(notes, **ACT)
    fed(made, window(1, bad_steps_total=0.0), window(2, bad_steps_total=1.0, bad_step=14.0))
    (asked,) = made.asked()
    assert (asked.rule, asked.act, asked.step) == ("nan", "rewind", 14)
    assert notes.told[0][0] == "error"
    made.finish(1.0)


def test_the_rules_of_a_config_are_listed_those_that_are_off_too() -> None:
    rules = [{"rule": "disk", "threshold": 0.8}, {"rule": "leak", "enabled": False}]
    alerts = {**ACT, "rules": rules, "detectors": ["thresholds", "robust"]}
    rows = {row["rule"]: row for row in rule_rows(JobConfig.model_validate({"alerts": alerts}))}
    assert set(rows) == {*ALERT_RULES, "unusual"}
    assert (rows["disk"]["fires"], rows["disk"]["on"]) == ("above 0.8", "yes")
    assert (rows["leak"]["on"], rows["xid"]["on"], rows["nan"]["act"]) == ("no", "GPUs alone", "rewind")
    assert (rows["unusual"]["on"], rows["unusual"]["fires"]) == ("yes", "alerts.detectors thresholds, robust")
    off = rule_rows(JobConfig.model_validate({"alerts": {"enabled": False}}))
    assert {row["on"] for row in off} == {"no"}


def test_a_silence_that_is_over_is_none() -> None:
    made = service(Notes(), silences=[{"rule": "disk", "until": "2020-01-01T00:00Z"}, {"rule": "nan"}])
    assert [each["rule"] for each in made.status()["silences"]] == ["nan"]
    made.finish(1.0)


def test_a_silence_by_hand_holds_and_names_what_it_does_not_know() -> None:
    notes = Notes()
    made = service(notes, **ACT)

    class Actor(AlertCalls):
        _telemetry = type("T", (), {"alerts": made})()

    actor = Actor()
    assert "saw 'dsk', which is no rule; nearest: disk (" in actor.silence("dsk", 60.0)
    assert "saw 'utilization', which is off in this run, which has no GPUs" in actor.silence(
        "utilization", 60.0
    )
    assert "saw 'nan', expected what a silence was given for: none" in actor.unsilence("nan")
    assert actor.silence("nan", 1e10, "we know") == ""
    fed(made, window(1, bad_steps_total=1.0, bad_step=14.0))
    assert made.asked() == []
    assert notes.told[-1][0] == "info"
    assert notes.told[-1][2].endswith("(silenced)")
    told = "\n".join(alert_lines({"run": "x", **(actor.alerts() or {})}, False))
    assert "critical nan (silenced)" in told
    assert re.search(
        r"silenced: nan for 115740 d \d+ h more \(until 2\d{3}-\d\d-\d\d .* UTC\): we know", told
    )
    assert actor.unsilence("nan") == ""
    fed(made, window(2, bad_steps_total=2.0, bad_step=18.0))
    assert notes.told[-1][0] == "error"
    made.finish(1.0)


def test_windows_that_come_too_fast_go_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes()
    made = service(notes)
    judged, begin = [], time.monotonic()
    monkeypatch.setattr(made._book, "observe", lambda *_: (time.sleep(0.02), judged.append(1), [])[2])
    for number in range(500):
        made.take(window(number))
    assert time.monotonic() - begin < 5.0, "10 s of judging; handing over waits for nobody"
    assert made.windows_dropped >= 500 - MOST_WAITING - 60
    made.finish(5.0)
    assert len(judged) + made.windows_dropped == 500


def test_an_error_of_a_rule_costs_a_window_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = service(Notes())
    observe, left = made._book.observe, [True]

    def once(*given: Any) -> Any:
        if left:
            left.pop()
            raise RuntimeError("a rule is broken")
        return observe(*given)

    monkeypatch.setattr(made._book, "observe", once)
    made.take(window(1))
    until(lambda: made.errors)
    fed(made, window(2))
    assert "a rule is broken" in caplog.text
    made.finish(1.0)


def test_a_sink_without_an_address_is_told_of_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_HOOK", raising=False)
    notes = Notes()
    made = service(notes, sinks=[{"kind": "slack", "url_env": "NO_SUCH_HOOK"}])
    ((level, _, text),) = notes.told
    assert level == "warning"
    assert "alerts.sinks.0 (slack): the environment variable NO_SUCH_HOOK is not set" in text
    made.finish(0.5)


@pytest.mark.parametrize("off", [{"alerts": {"enabled": False}}, {"telemetry": {"interval_s": None}}])
def test_alerts_that_are_off_judge_nothing(tmp_path: Path, off: dict[str, Any]) -> None:
    job = JobConfig.model_validate({**off, "storage": {"url": str(tmp_path)}})
    run = open_telemetry(job, RunRecord(job), lambda: True, "cpu")
    assert run.alerts is None
    on = JobConfig.model_validate({"storage": {"url": str(tmp_path)}})
    told = open_telemetry(on, RunRecord(on), lambda: True, "cpu")
    assert told.alerts is not None
    assert told.alerts.take in told.listeners
