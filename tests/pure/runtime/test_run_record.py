"""What the summary says of failures, from the events that the coordinator handles."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.codec import plain
from picotron_ray.coordinator.housekeeping import NOT_REPLACED
from picotron_ray.coordinator.replay import event_line
from picotron_ray.failures import FailureKind
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime import process_log
from picotron_ray.runtime.coordinator import records, run_record
from picotron_ray.runtime.coordinator.beginning import begin_event
from picotron_ray.runtime.coordinator.event_log.files import LoggedLine
from picotron_ray.runtime.coordinator.records import MEMBERS_KEPT
from picotron_ray.runtime.coordinator.run_record import RunRecord
from tests.support.runs.coordinator_world import World, job, of

BEGAN = 1_000_000.0


class Run:
    """Generations of workers ``a``, ``b``, … on one node, told to a record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(time, "time", lambda: BEGAN)
        self.record = RunRecord(job())
        self.spec: m.GenerationSpec

    def generation(
        self, n: int, workers: Sequence[str], step: int, at_s: float, source: Any = "slots"
    ) -> None:
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


def test_a_failure_names_the_evidence_of_its_generation_after_a_restart_too(run: Run) -> None:
    run.generation(1, "abc", 0, 1.0, "init")
    run.record.evidence("evidence/1-1-1.1.json", "1.1")
    run.record.evidence("evidence/1-1-1.1.json", "1.1")
    run.tell(2.0, m.Stalled("a", run.spec.id, "forward", 3.0))
    run.generation(2, "bc", 7, 2.1)
    run.tell(3.0, m.WorkerExited("b", "process died"))
    expected = ["evidence/1-1-1.1.json", None]
    assert [failure["evidence"] for failure in run.failures()] == expected
    told = [event["text"] for event in run.record.status(0)["events"] if event["kind"] == "evidence"]
    assert told == ["stacks of generation 1.1 are in evidence/1-1-1.1.json"]
    again = RunRecord(job())
    again.recall(json.loads(json.dumps(run.record.memo())), [])
    again.evidence("evidence/1-1-1.1.json", "1.1")
    assert [failure["evidence"] for failure in again.status(0)["failures"]] == expected


def test_a_generation_from_a_commit_says_how_many_steps_that_costs(run: Run) -> None:
    def told() -> list[tuple[str, float]]:
        events = run.record.status(0)["events"]
        return [(each["text"], each["t"] - BEGAN) for each in events if each["kind"] == "gone-back"]

    run.generation(1, "ab", 0, 1.0, "init")
    run.tell(2.0, m.Heartbeat("node", run.spec.id, {"a": 489}))
    run.generation(2, "ab", 450, 3.0, "commit")
    assert told() == [("goes back 39 steps, from step 489 to the commit of step 450", 3.0)]
    run.generation(3, "a", 449, 4.0)
    run.generation(4, "a", 449, 5.0, "commit")
    assert len(told()) == 1, "neither from memory nor without a loss"


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


def page(worker: str, n: int = 1, **changes: Any) -> dict[str, Any]:
    plain = {
        "worker": worker, "term": 1, "n": n, "rank": 0, "step": 5, "tokens": 500, "loss": 2.0,
        "eval_step": -1, "eval_loss": 0.0, "baseline_loss": 3.0, "step_time_s": 0.5, "first_step_at_s": 0.0,
        "pinned_wait_s": 0.01, "skipped_step": -1, "bad_steps": 1,
    }  # fmt: skip
    return {**plain, **changes}


def test_a_status_before_anything_ran(run: Run) -> None:
    found = run.record.status(0)
    wanted = {
        "state": "starting", "term": 0, "generation": None, "layout": None, "members": [], "resume_step": 0,
        "step": 0, "steps": 100, "loss": None, "tokens_per_s": None, "eval_loss": None, "eval_step": None,
        "baseline_loss": None, "committed": None, "pages": {}, "metrics": None, "failures": [], "events": [],
        "done": False, "exit_code": None, "detail": "", "summary": None, "began_s": BEGAN, "submissions": [],
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted
    assert run.record.measured().generation is None


def test_a_status_of_a_run_shows_what_rank_0_says(run: Run) -> None:
    run.generation(3, "ab", 4, 1.0)
    run.record.figures(
        "n1", [page("old", 2, loss=9.0), page("b", 3, rank=1, loss=8.0, eval_step=2, eval_loss=7.0)]
    )
    run.record.figures("n2", [page("a", 3, step=6, eval_step=4, eval_loss=6.0, baseline_loss=4.0)])
    found = run.record.status(0)
    data = job().data
    wanted = {
        "state": "running", "generation": "1.3", "members": ["a", "b"], "resume_step": 4, "step": 6,
        "loss": 2.0, "tokens_per_s": data.global_batch * data.sequence_length / 0.5, "eval_loss": 6.0,
        "eval_step": 4, "baseline_loss": 4.0,
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == wanted
    assert {name: seen["node"] for name, seen in found["pages"].items()} == {
        "old": "n1",
        "b": "n1",
        "a": "n2",
    }
    measured = run.record.measured()
    assert (measured.generation, measured.generations, measured.tokens) == (3, 1, 500)
    assert measured.evaluations == {2: 7.0, 4: 6.0}
    assert measured.leader["worker"] == "a"


def test_events_are_numbered_and_asked_for_by_number(run: Run) -> None:
    run.record.begin(2, {})
    submission = {"submission_id": "x"}
    run.record.attached(submission)
    run.record.attached(submission)
    run.generation(1, "ab", 0, 1.0, "init")
    run.record.note("warning", "recovery", "generation 1.2")
    found = run.record.status(0)
    assert [(event["seq"], event["kind"], event["level"]) for event in found["events"]] == [
        (1, "term", "info"), (2, "submission", "info"), (3, "recovery", "warning")
    ], "that of a generation is the machine's to tell"  # fmt: skip
    assert [event["seq"] for event in run.record.status(1)["events"]] == [2, 3]
    assert (found["submissions"], found["term"], found["state"]) == ([submission], 2, "running")
    assert run.record.measured().noted == {"info": 2, "warning": 1}
    run.record.begin(3, {})
    assert run.record.status(0)["state"] == "starting", "it has none of its own yet"


def test_a_step_without_an_update_is_told_once(run: Run) -> None:
    """By whichever worker is heard first; a later generation that comes by again is not told of it twice."""
    run.generation(1, "ab", 0, 1.0)
    run.record.figures("n1", [page("a", skipped_step=4), page("b", rank=1, skipped_step=4)])
    run.generation(2, "ab", 3, 2.0)
    run.record.figures("n1", [page("a", 2, skipped_step=4)])
    run.record.figures("n1", [page("a", 2, skipped_step=9)])
    told = [event for event in run.record.status(0)["events"] if event["kind"] == "skipped"]
    assert [(event["level"], event["data"]) for event in told] == [
        ("warning", {"step": 4}),
        ("warning", {"step": 9}),
    ]
    batch = job().data.global_batch
    assert f"step 9 (samples {8 * batch} to {9 * batch - 1})" in told[1]["text"]


def test_bad_steps_in_a_row_are_told_with_their_number_and_not_line_by_line(run: Run) -> None:
    """The first at once, then each time that they are twice as many; a later generation counts anew."""
    run.generation(1, "ab", 0, 1.0)
    for count in range(1, 11):
        run.record.figures("n1", [page("a", skipped_step=count, bad_steps=count)])
    run.generation(2, "ab", 10, 2.0)
    run.record.figures("n1", [page("a", 2, skipped_step=12, bad_steps=1)])
    run.record.figures("n1", [page("a", 2, skipped_step=19, bad_steps=8)])
    told = [event["text"] for event in run.record.status(0)["events"] if event["kind"] == "skipped"]
    assert [(text.split()[1], text.partition("left out")[2]) for text in told] == [
        ("1", ""),
        ("2", ", as those of 1 others in this generation"),
        ("4", ", as those of 3 others in this generation"),
        ("8", ", as those of 7 others in this generation"),
        ("12", ""),
        ("19", ", as those of 7 others in this generation"),
    ]


def test_events_go_to_the_log_of_the_process_too(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    package, root = logging.getLogger("picotron_ray"), logging.getLogger()
    before = (package.level, list(root.handlers))
    try:
        process_log.begin()
        process_log.begin()  # a worker's and a coordinator's class may share a process in tests
        run.record.note("warning", "storage", "it is full")
        run.record.note("info", "commit", "step 5 committed")
    finally:
        package.setLevel(before[0])
        root.handlers[:] = before[1]
    lines = capsys.readouterr().out.splitlines()
    logger = "picotron_ray.runtime.coordinator.run_record"
    assert [line.split(" ", 1)[1] for line in lines] == [
        f"WARNING {logger} [] it is full",
        f"INFO {logger} [] step 5 committed",
    ]


def test_a_held_out_loss_of_steps_that_were_given_up_is_shown_no_more(run: Run) -> None:
    run.generation(1, "a", 0, 1.0)
    for step, loss in ((5, 3.0), (10, 2.5)):
        run.record.figures("n1", [page("a", step=step, eval_step=step, eval_loss=loss)])
    assert run.record.status(0)["eval_loss"] == 2.5
    run.generation(2, "a", 7, 2.0)
    assert (run.record.status(0)["eval_loss"], run.record.measured().evaluations) == (3.0, {5: 3.0})
    run.record.figures("n1", [page("a", 2, step=10, eval_step=10, eval_loss=2.0)])
    assert run.record.status(0)["eval_loss"] == 2.0


def test_a_held_out_loss_of_nan_is_no_figure(run: Run) -> None:
    run.generation(1, "a", 0, 1.0)
    run.record.figures("n1", [page("a", eval_step=5, eval_loss=math.nan)])
    assert run.record.status(0)["eval_loss"] is None
    assert run.record.measured().evaluations == {}
    json.dumps(run.record.status(0), allow_nan=False)


def test_a_launch_that_trains_nothing_keeps_the_figures_of_the_one_before(run: Run) -> None:
    """Of a finished run whose command is typed again; nobody evaluates there, and no page is heard of."""
    run.record.begin(1, {})
    run.generation(1, "a", 0, 1.0, "init")
    run.record.figures("n1", [page("a", step=100, eval_step=100, eval_loss=1.5, baseline_loss=2.5)])
    finish = m.Finish("finished", "step 100")
    told = m.Alert("info", "text", "calibration", {"predicted_s": 0.3, "measured_s": 0.25, "ratio": 0.83})
    run.record.observe(m.Tick(), [told], BEGAN + 2.0)
    before = run.record.summary(finish)
    assert (before["eval_loss"], before["baseline_loss"], before["steps"]) == (1.5, 2.5, 100)
    (generation,) = before["generations"]
    assert (generation["predicted_s"], generation["measured_s"]) == (0.3, 0.25)
    again = RunRecord(job())
    again.recall(json.loads(json.dumps(run.record.memo())), [])
    again.begin(2, {})
    assert {key: again.summary(finish)[key] for key in before} == before
    found = again.status(0)
    assert (found["step"], found["eval_loss"], found["eval_step"]) == (100, 1.5, 100)
    older = json.loads(json.dumps(run.record.memo()))
    del older["facts"]["baseline_loss"]
    del older["facts"]["generations"][0]["measured_s"]
    again.recall(older, [])
    assert (again.status(0)["eval_loss"], again.status(0)["baseline_loss"]) == (1.5, None)


def test_commits_are_listed_with_their_figures(run: Run) -> None:
    run.record.begin(1, {10: {"bytes": 7}})
    run.generation(1, "ab", 0, 1.0, "init")
    run.record.figures("n1", [page("a", pinned_wait_s=0.25), page("b", rank=1)])
    for step, seq in ((10, 4), (12, 0), (20, 5)):
        run.tell(5.0 + seq, m.Appended("commit", run.spec.id, step, seq=seq))
    run.tell(30.0, m.Appended("generation", run.spec.id, 0, seq=6))
    found = run.record.measured()
    assert found.checkpoints == [{"step": 10, "stall_s": 0.25, "bytes": 7}, {"step": 20, "stall_s": 0.25}]
    assert found.committed_at_s == BEGAN + 10.0
    assert run.record.status(0)["committed"] == 20
    assert run.record.summary(m.Finish("finished", ""))["steps"] == 20


def test_a_summary_counts_the_steps_of_the_whole_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.generation(1, "ab", 10, 1.0)
    for step, seconds in ((11, 0.5), (12, 0.25), (13, 1.0)):
        run.record.figures(
            "n1", [page("a", step=step, step_time_s=seconds), page("b", rank=1, step_time_s=9.0)]
        )
    run.record.figures("n1", [page("a", step=13, step_time_s=0.0)])
    monkeypatch.setattr(time, "time", lambda: BEGAN + 4.0)
    found = run.record.summary(m.Finish("stopped", "step 13"))
    data = job().data
    assert (found["status"], found["detail"], found["steps"]) == ("stopped", "step 13", 13)
    assert found["tokens_per_s"] == data.global_batch * data.sequence_length / 0.5
    assert (found["goodput"], found["wall_s"]) == (3 * 0.5 / 4.0, 4.0)
    monkeypatch.setattr(time, "time", lambda: BEGAN + 1.0)
    assert run.record.summary(m.Finish("stopped", ""))["goodput"] == 1.0
    empty = RunRecord(job()).summary(m.Finish("failed", "x"))
    assert (empty["steps"], empty["tokens_per_s"], empty["goodput"], empty["wall_s"]) == (0, None, None, 0.0)


DAY = 86_400.0


def lines_of(launch: str, *at_s: float) -> list[LoggedLine]:
    """Lines of one launch's log."""
    line = {"event": {"type": "Tick"}, "commands": []}
    return [LoggedLine(1, {"launch": launch, "offset_s": 0.0}, {**line, "now": BEGAN + at}) for at in at_s]


@pytest.mark.parametrize("recorded", [True, False])
def test_a_pause_between_two_launches_is_no_part_of_goodput(
    run: Run, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """Ten steps of a second each in 20 s of the first launch; a day later ten more in 20 s of the next."""
    run.record.recall(None, [], "one")
    run.generation(1, "a", 0, 0.0, "init")
    run.record.figures("n1", [page("a", step=10, step_time_s=1.0)])
    monkeypatch.setattr(time, "time", lambda: BEGAN + 20.0)
    memo = json.loads(json.dumps(run.record.memo()))
    assert memo["goodput"] == 0.5
    monkeypatch.setattr(time, "time", lambda: BEGAN + DAY + 20.0)
    later = RunRecord(job())
    if recorded:
        later.recall(memo, lines_of("two", DAY + 20.0), "two")
    else:
        later.recall(None, [*lines_of("one", 0.0, 16.0, 20.0), *lines_of("two", DAY + 20.0)], "two")
        monkeypatch.setattr(run, "record", later)
        run.generation(1, "a", 0, 0.0, "init")
    monkeypatch.setattr(time, "time", lambda: BEGAN + DAY + 26.0)
    newest = json.loads(json.dumps(later.memo()))
    monkeypatch.setattr(time, "time", lambda: BEGAN + DAY + 30.0)
    again = RunRecord(job())  # Ray starts the coordinator again: workers have trained on
    again.recall(newest, [], "two")
    run.record = again
    run.generation(2, "a", 10, DAY + 30.0)
    again.figures("n1", [page("a", 2, step=20, step_time_s=1.0)])
    monkeypatch.setattr(time, "time", lambda: BEGAN + DAY + 40.0)
    found = again.summary(m.Finish("finished", ""))
    assert (found["wall_s"], found["lived_s"], found["goodput"]) == (DAY + 40.0, 40.0, 0.5)


def test_a_stop_at_a_breakpoint_is_no_part_of_goodput(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps of a second each in 80 s, of which a person held the run for 60."""
    run.generation(1, "a", 0, 0.0, "init")
    run.record.figures("n1", [page("a", step=10, step_time_s=1.0)])
    for at_s, phase, held_s in ((15.0, "forward", 0.0), (45.0, "hold", 30.0), (75.0, "hold", 60.0)):
        monkeypatch.setattr(time, "time", lambda at_s=at_s: BEGAN + at_s)
        spent = {"forward": 15.0, "hold": held_s}
        run.record.figures("n1", [page("a", step=10, step_time_s=1.0, phase=phase, phases_s=spent)])
    assert run.record.memo()["goodput"] == pytest.approx(10.0 / 15.0), "it sinks not while the hold lasts"
    again = RunRecord(
        job()
    )  # Ray starts the coordinator again within the hold: no alert tells how long it was
    again.recall(json.loads(json.dumps(run.record.memo())), [], "")
    run.record = again
    run.generation(1, "a", 0, 75.0, "init")
    monkeypatch.setattr(time, "time", lambda: BEGAN + 80.0)
    spent = {"forward": 20.0, "hold": 60.0}
    again.figures("n1", [page("a", step=10, step_time_s=1.0, phase="forward", phases_s=spent)])
    found = again.summary(m.Finish("finished", ""))
    assert (found["wall_s"], found["lived_s"], found["paused_s"]) == (80.0, 20.0, 60.0)
    assert found["goodput"] == 0.5
    told = again.status(0)
    assert (told["wall_s"] - told["seconds"]["paused"], told["seconds"]["paused"]) == (20.0, 60.0)


def test_a_record_of_an_earlier_version_knows_of_no_pause_but_the_newest(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    memo = json.loads(json.dumps(run.record.memo()))
    del memo["launch"], memo["paused_s"]
    monkeypatch.setattr(time, "time", lambda: BEGAN + 100.0)
    later = RunRecord(job())
    later.recall(memo, [], "two")
    monkeypatch.setattr(time, "time", lambda: BEGAN + 107.0)
    assert later.summary(m.Finish("failed", ""))["lived_s"] == 7.0


@pytest.mark.parametrize(
    ("status", "level", "code"),
    [("finished", "info", 0), ("stopped", "info", 130), ("failed", "error", 3), ("storage", "error", 4),
     ("fenced", "error", 3)],
)  # fmt: skip
def test_an_end_is_told_with_its_exit_code(run: Run, status: Any, level: str, code: int) -> None:
    run.record.done(m.Finish(status, "why"), {"x": 1})
    found = run.record.status(0)
    assert (found["state"], found["done"], found["exit_code"], found["detail"]) == (status, True, code, "why")
    assert found["summary"] == {"x": 1}
    (event,) = found["events"]
    assert (event["level"], event["kind"], event["text"]) == (level, status, f"run {status}: why")


def test_earlier_terms_are_recalled_in_this_times_clock(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 500.0)
    run.generation(1, "ab", 0, 1.0, "init")
    lines = [
        json.loads(event_line(450.0 + at, event, []))
        for at, event in enumerate((m.Tick(), m.WorkerExited("a", "killed")))
    ]
    run.record.recall(None, [LoggedLine(1, {}, line) for line in lines])
    assert run.record.status(0)["began_s"] == BEGAN - 50.0
    (failure,) = run.failures()
    assert (failure["target"], failure["detected_s"]) == ("a", 1.0)


def test_what_earlier_terms_told_since_their_record_is_told_with_its_time(run: Run) -> None:
    alert = m.Alert("warning", "generation 1.2: 1 workers", "recovery", {"lost_steps": 1})
    line = json.loads(event_line(5.0, m.Tick(), [alert]))
    run.record.recall(None, [LoggedLine(1, {"offset_s": BEGAN}, line)])
    (event,) = run.record.status(0)["events"]
    assert (event["t"], event["level"], event["kind"]) == (BEGAN + 5.0, "warning", "recovery")
    assert (event["text"], event["data"]) == (alert.text, alert.data)


def test_what_the_machine_found_by_itself_is_a_failure_too(run: Run) -> None:
    def judged(at_s: float, **data: Any) -> None:
        alert = m.Alert("warning", "text", "failure", data)
        run.record.observe(m.Tick(), [alert], BEGAN + at_s)

    judged(0.5, cause="late", target="a")
    assert run.failures() == [], "nothing ran"
    run.generation(1, "ab", 0, 1.0, "init")
    judged(2.0, cause="late", target="a")
    judged(2.5, cause="late", target="b")
    (failure,) = run.failures()
    assert (failure["target"], failure["detected_s"]) == ("a", 2.0)


def test_a_replacement_that_does_not_start_strikes_no_generation(run: Run) -> None:
    """At the end it was told as not survived, after thousands of further steps."""
    run.generation(1, "ab", 0, 1.0, "init")
    data = {"cause": FailureKind.START_FAILED.value, "target": "node"}
    run.record.observe(m.Tick(), [m.Alert("warning", "text", "failure", data)], BEGAN + 2.0)
    assert run.failures() == []


def test_a_record_keeps_no_slots_of_the_generations_that_were(run: Run) -> None:
    """At 1,000 ranks they would be most of it, and it is written with every commit."""
    run.record.begin(1, {})
    run.generation(1, "abc", 0, 1.0, "init")
    one = run.spec.id
    slot = m.SlotInfo("node", "a.0.slot", one, 7, 0, ())
    two = replace(run.spec, id=m.GenerationId(1, 2), source=m.Source("slots", 7, one, (slot,)))
    run.record.observe(m.Tick(), [m.RunGeneration(two)], BEGAN + 2.0)
    memo = run.record.memo()
    assert [entry["source"] for entry in memo["facts"]["generations"]] == ["init", "slots"]
    assert "a.0.slot" not in json.dumps(memo)


def test_a_record_comes_back_as_it_was(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures that are still open too: the next term notes when their generation went on."""
    run.record.begin(1, {5: {"bytes": 7}})
    run.generation(1, "abc", 0, 1.0, "init")
    run.tell(2.0, m.WorkerExited("a", "died"), run.outcome("b", 7, 1.5), run.outcome("c", 7, 1.5))
    run.generation(2, "bc", 7, 2.1)
    run.tell(2.5, m.Appended("commit", run.spec.id, 8, 3), m.Heartbeat("node", run.spec.id, {"b": 9}))
    run.tell(3.0, m.WorkerExited("b", "died"), run.outcome("c", 9))
    run.record.observe(m.UserRequest("stop"), [], BEGAN + 3.0, line=17)
    memo = json.loads(json.dumps(run.record.memo()))
    assert (memo["term"], memo["line"]) == (1, 17)
    later = Run(monkeypatch)
    later.record.recall(memo, [])
    before, after = run.record.status(0), later.record.status(memo["seq"])
    for name in ("failures", "committed", "began_s", "resume_step", "step", "members"):
        assert after[name] == before[name], name
    assert after["continues"]
    assert after["events"] == [], "whoever has seen them is not told again"
    later.spec = run.spec
    later.generation(3, "c", 9, 3.2)
    later.tell(4.0, m.Heartbeat("node", later.spec.id, {"c": 10}))
    assert [failure["recovered_s"] is not None for failure in later.failures()] == [True, True]
    assert len(later.failures()) == 2
    later.record.note("info", "term", "two")
    (told, *_) = later.record.status(memo["seq"])["events"]
    assert told["seq"] > memo["seq"]


def test_memory_that_ran_out_is_remembered_though_the_coordinator_dies_before_the_next_generation(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(job(data__global_batch=32, cluster__max_workers=2))
    spec = world.run(world.answer(world.ready(world.send(m.Begin(1), m.NodeJoined("a", 2)))))
    gone = m.Outcome(spec.members[0].worker, spec.id, FailureKind.FAILED, 5, "oom: 3 GiB")
    commands = world.send(gone)
    assert not any(isinstance(command, m.AppendGeneration | m.RunGeneration) for command in commands)
    run.record.observe(gone, commands, BEGAN + 2.0)
    memo = json.loads(json.dumps(run.record.memo()))
    line = json.loads(event_line(2.0, gone, commands))
    for known, lines in ((memo, []), (None, [LoggedLine(1, {"offset_s": BEGAN}, line)])):
        later = Run(monkeypatch)
        later.record.recall(known, lines)
        begin = begin_event(2, (), (spec,), {}, **later.record.past())
        again = World(world.config)
        again.send(begin)
        assert again.machine.memory.struck == world.machine.memory.struck != ()


@pytest.mark.parametrize(("launch", "owed"), [("one", True), ("two", False)])
def test_a_stop_is_owed_by_the_launch_that_was_asked(run: Run, launch: str, owed: bool) -> None:
    stop = {"now": 1.0, "event": {"type": "UserRequest", "what": "stop"}, "commands": []}
    line = LoggedLine(1, {"launch": "one", "offset_s": BEGAN}, stop)
    run.record.recall(None, [line], launch)
    assert (run.record.owed == (m.UserRequest("stop"),)) is run.record.status(0)["stopping"] is owed


def test_a_stop_is_owed_until_the_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.record.recall(None, [], "one")
    run.tell(1.0, m.UserRequest("checkpoint"), m.Appended("commit", m.GenerationId(1, 1), 5, 9))
    assert run.record.owed == ()
    run.tell(1.0, m.UserRequest("stop"), m.Appended("commit", m.GenerationId(1, 1), 7, 11))
    later = Run(monkeypatch)
    later.record.recall(json.loads(json.dumps(run.record.memo())), [], "one")
    assert later.record.owed == (m.UserRequest("stop"),)
    later.record.observe(m.Tick(), [m.Finish("stopped", "step 5")], BEGAN + 2.0)
    assert later.record.owed == ()


@pytest.mark.parametrize("trains", [False, True])
def test_a_checkpoint_is_owed_until_the_next_commit(
    run: Run, monkeypatch: pytest.MonkeyPatch, trains: bool
) -> None:
    """The next term learns of it from the record or from the log, and its machine has it taken."""
    ask, first = m.UserRequest("checkpoint"), World()
    spec = first.up(("a", 4)) if trains else None
    line = LoggedLine(1, {"launch": "one", "offset_s": BEGAN}, json.loads(event_line(1.0, ask, [])))
    run.record.recall(None, [line], "one")
    memo = json.loads(json.dumps(run.record.memo()))
    for known, lines in ((None, [line]), (memo, [])):
        later, world = Run(monkeypatch), World()
        later.record.recall(known, lines, "one")
        assert later.record.owed == (ask,)
        assert not later.record.status(0)["stopping"]
        if spec is None:
            started = world.begin(("a", 4), term=2)
            world.send(*later.record.owed)
            made = world.run(world.answer(world.ready(started)))
        else:
            begin = m.Begin(2, generations=(spec,), running=spec, workers=spec.members)
            world.send(begin, *later.record.owed)
            made = spec
        taken = of(world.wait(1.0, steps=1), m.TakeSnapshot)
        assert [command.generation for command in taken] == [made.id], "of members that train, and so hear it"
        later.tell(2.0, m.Appended("commit", made.id, 7, error="storage is down"))
        assert later.record.owed == (ask,)
        later.tell(3.0, m.Appended("commit", made.id, 8, 9))
        assert later.record.owed == ()
    another = Run(monkeypatch)
    another.record.recall(memo, [], "two")
    assert another.record.owed == (), "another launch was asked"


def test_a_record_of_before_checkpoints_were_remembered_is_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.record.recall(None, [], "one")
    run.tell(1.0, m.UserRequest("stop"))
    memo = json.loads(json.dumps(run.record.memo()))
    del memo["checkpoint_of"]
    later = Run(monkeypatch)
    later.record.recall(memo, [], "one")
    assert later.record.owed == (m.UserRequest("stop"),)


def test_an_end_that_was_decided_is_owed_by_that_launch_until_a_term_begins(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the record, and from the log's lines where the record is older."""
    run.record.recall(None, [], "one")
    end = m.Finish("storage", "full", m.Source("slots"))
    run.record.observe(m.Tick(), [end], BEGAN + 2.0)
    memo = json.loads(json.dumps(run.record.memo()))
    head = {"launch": "one", "offset_s": BEGAN}

    def recalled(*lines: dict[str, Any], launch: str = "one", memo: Any = None) -> m.Finish | None:
        later = Run(monkeypatch)
        later.record.recall(memo, [LoggedLine(1, head, line) for line in lines], launch)
        return later.record.ended

    line = json.loads(event_line(2.0, m.Tick(), [end]))
    assert recalled(memo=memo) == recalled(line) == end
    assert recalled(memo=memo, launch="two") is recalled(line, launch="two") is None
    begun = json.loads(event_line(3.0, begin_event(2, (), (), {}), []))
    assert recalled(line, begun) is recalled(begun, memo=memo) is None, "a newer term went on"
    assert recalled(json.loads(event_line(2.0, m.Tick(), [m.Finish("fenced", "")]))) is None
    del memo["end"], memo["end_of"]
    assert recalled(memo=memo) is None, "of an earlier version"


def test_a_record_stays_small_however_often_the_run_commits(run: Run) -> None:
    run.generation(1, "a", 0, 1.0, "init")
    for step in range(12_000):
        run.tell(2.0, m.Appended("commit", run.spec.id, step, step))
    assert len(run.record.memo()["facts"]["checkpoints"]) == 10_000
    assert run.record.status(0)["committed"] == 11_999


def test_a_record_stays_small_however_many_generations_of_many_workers_there_were(run: Run) -> None:
    """Members of the newest are named, in the summary too; older ones by number and digest."""
    run.record.begin(1, {})
    for n in range(1000):
        members = tuple(m.Member(f"w1-{n}-{rank}", f"{rank // 8:056d}") for rank in range(64))
        spec = m.GenerationSpec(m.GenerationId(1, n), members, Layout(dp=64), m.Source("slots", n), "test")
        launched = m.Alert("info", "text", "generation", {"members": [one.worker for one in members] * 10})
        run.record.observe(m.WorkerExited(f"w1-{n - 1}-3", "died"), [m.RunGeneration(spec)], BEGAN + n)
        run.record.note("info", "generation", "text", launched.data)
        run.record.figures("node", [page(one.worker, n) for one in members])
        for one in members:
            run.record.observe(m.WorkerExited(one.worker, "died"), [], BEGAN + n)
    assert len(json.dumps(run.record.memo())) < 2 << 20
    assert run.record.status(0)["pages"] == {}, "of workers that are gone nothing is shown"
    generations = run.record.summary(m.Finish("finished", ""))["generations"]
    assert len(generations) == 1000
    newest, oldest = generations[-1], generations[0]
    assert newest["members"] == [f"w1-999-{rank}" for rank in range(64)]
    assert (oldest["members"], oldest["workers"]) == (None, 64)
    assert oldest["members_digest"] != newest["members_digest"]
    assert sum(one["members"] is not None for one in generations) == MEMBERS_KEPT // 64


def test_the_newest_members_are_kept_however_many_they_are(run: Run) -> None:
    """A failure's late sign is judged by the generation before the newest."""
    size = MEMBERS_KEPT
    for n in (1, 2, 3):
        run.generation(n, [f"w{n}-{rank}" for rank in range(size)], 0, float(n))
    named = [one["members"] is not None for one in run.record.summary(m.Finish("stopped", ""))["generations"]]
    assert named == [False, True, True]


def test_members_that_are_given_up_meanwhile_are_in_a_record_that_was_copied_before(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log's thread formats a copy without the lock; it found no members where it had just seen some."""
    monkeypatch.setattr(records, "MEMBERS_KEPT", 4)
    for n in (1, 2):
        run.generation(n, "abc", 0, float(n))
    copied = run.record._facts.copied()
    before = run_record.plain_facts(copied)
    for n in (3, 4):
        run.generation(n, "abc", 0, float(n))
    assert run_record.plain_facts(copied) == before
    assert "names" not in run.record.memo()["facts"]["generations"][0]


def test_nobody_waits_for_a_record_that_is_turned_into_values(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of workers take seconds: the coordinator's loop and a driver go on meanwhile."""
    run.generation(1, "abc", 0, 1.0, "init")
    turned = threading.Event()

    def slow(facts: Any) -> dict[str, Any]:
        thread = threading.Thread(target=lambda: (run.record.status(0), turned.set()))
        thread.start()
        thread.join(5.0)
        return {}

    monkeypatch.setattr(run_record, "plain_facts", slow)
    run.record.memo()
    assert turned.is_set()


def test_what_a_record_holds_does_not_change_while_it_is_turned_into_values(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.generation(1, "abc", 0, 1.0, "init")
    run.tell(2.0, m.WorkerExited("a", "died"), run.outcome("b", 7, 1.5), run.outcome("c", 7, 1.5))
    turned = run_record.plain_facts

    def meanwhile(facts: Any) -> dict[str, Any]:
        run.generation(2, "bc", 7, 2.1)
        run.tell(3.0, m.Heartbeat("node", run.spec.id, {"b": 9}))
        return turned(facts)

    monkeypatch.setattr(run_record, "plain_facts", meanwhile)
    facts = run.record.memo()["facts"]
    assert [one["n"] for one in facts["generations"]] == [1]
    assert [one["recovered_s"] for one in facts["failures"]] == [None]


def test_a_follower_of_many_workers_is_shown_the_page_of_rank_0_alone(run: Run) -> None:
    run.generation(1, "abc", 0, 1.0, "init")
    run.record.figures("node", [page(name, rank=rank) for rank, name in enumerate("abc")])
    assert set(run.record.status(0)["pages"]) == set(run.record.status(0, 3)["pages"]) == set("abc")
    assert set(run.record.status(0, 2)["pages"]) == {"a"}
    assert run.record.status(0, 2)["step"] == 5


def test_a_record_of_an_earlier_version_is_read(run: Run) -> None:
    """It held each generation's whole spec, and named a failure's generation by its place."""
    run.generation(1, "abc", 0, 1.0, "init")
    run.tell(2.0, m.WorkerExited("a", "died"))
    memo = json.loads(json.dumps(run.record.memo()))
    memo["facts"]["generations"] = [{"spec": plain(run.spec), "end_step": 3}]
    memo["facts"]["failures"] = [{**memo["facts"]["failures"][0], "struck": "", "generation": 0}]
    later = RunRecord(job())
    later.recall(json.loads(json.dumps(memo)), [])
    assert later.status(0)["members"] == ["a", "b", "c"]
    assert later.memo()["facts"]["failures"][0]["struck"] == "1.1"


def test_a_heartbeat_that_comes_late_brings_back_no_page_for_good(run: Run) -> None:
    """A relay carries it for a second; what it says of a worker that died since lasts until the next."""
    run.generation(1, "ab", 0, 1.0, "init")
    late = [page("a"), page("b")]
    run.record.figures("node", late)
    run.record.figures("other", [page("c")])
    run.tell(2.0, m.WorkerExited("a", "died"))
    run.record.figures("node", late)
    run.record.figures("node", [page("b")])
    assert set(run.record.status(0)["pages"]) == {"b", "c"}
    run.tell(3.0, m.NodeLost("node", "gone"))
    assert set(run.record.status(0)["pages"]) == {"c"}
    run.record.figures("node", late)
    assert set(run.record.status(0)["pages"]) == {"c"}, "no later one comes of a node that is lost"
    run.tell(4.0, m.NodeJoined("node", 2))
    run.record.figures("node", [page("d")])
    assert set(run.record.status(0)["pages"]) == {"c", "d"}


def appended(kind: Any, error: str = "", step: int = 0) -> m.Appended:
    return m.Appended(kind, m.GenerationId(1, 1), step, 0 if error else 7, error=error)


def uploaded(error: str = "", node: str = "node") -> m.Uploaded:
    return m.Uploaded(node, m.GenerationId(1, 1), 10, error)


@pytest.mark.parametrize(
    ("told", "is_uncommitted"),
    [
        ([uploaded("gone:w1.0.slot")], False),
        ([uploaded("corrupt:w1.0.slot")], False),
        ([uploaded("503")], True),
        ([uploaded("503"), uploaded("", "other")], True),
        ([uploaded("503"), uploaded()], False),
        ([uploaded("503"), uploaded("gone:w1.0.slot")], False),
        ([uploaded("503"), m.NodeLost("node", "gone")], False),
        ([appended("generation", "503")], True),
        ([appended("generation", "503"), appended("generation")], False),
        ([appended("commit", "503", 10), uploaded()], True),
        ([uploaded("503"), appended("commit", "503", 10), appended("commit", "", 10)], False),
    ],
)
def test_a_run_is_uncommitted_while_storage_fails(
    run: Run, told: list[m.Event], is_uncommitted: bool
) -> None:
    """`stop --now` is refused then, and in no other case."""
    run.tell(1.0, *told)
    assert run.record.status(0)["uncommitted"] is is_uncommitted
    again = RunRecord(job())
    again.recall(json.loads(json.dumps(run.record.memo())), ())
    assert again.status(0)["uncommitted"] is is_uncommitted, "a restart forgets no reason, and finds none"


def test_a_wait_for_storage_ends_with_its_answer_and_what_was_kept_with_a_commit(run: Run) -> None:
    def is_uncommitted() -> bool:
        return bool(run.record.status(0)["uncommitted"])

    run.record.note("warning", "storage-wait", "no answer")
    assert is_uncommitted()
    run.record.begin(1, {})
    assert not is_uncommitted()
    run.record.note("warning", "storage-wait", "no answer")
    run.record.note("info", "kept", "step 3")
    run.tell(1.0, appended("generation"))
    assert is_uncommitted()
    run.tell(2.0, appended("commit", "", 3))
    assert not is_uncommitted()
    old = RunRecord(job())
    old.recall({**run.record.memo(), "uncommitted": True}, ())
    assert old.status(0)["uncommitted"], "as a record of an earlier version says it"


def test_a_failure_that_ended_its_launch_is_not_recovered_from_by_the_next(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.generation(1, "ab", 0, 1.0, "init")
    run.tell(2.0, m.WorkerExited("a", "process died"))
    run.record.observe(m.Tick(), [m.Finish("failed", "too many failures")], BEGAN + 2.1)
    later = Run(monkeypatch)
    later.record.recall(json.loads(json.dumps(run.record.memo())), [])
    later.generation(2, "ab", 0, 42.0)
    later.tell(43.0, m.Heartbeat("node", later.spec.id, {"a": 9}))
    assert [failure["recovered_s"] for failure in later.failures()] == [None]


def test_the_newest_event_of_earlier_terms_is_known(run: Run) -> None:
    run.record.note("info", "term", "one")
    first = run.record.status(0)
    assert first["recalled"] == 0
    later = RunRecord(job())
    later.recall(run.record.memo(), [])
    later.note("info", "term", "two")
    seen = later.status(0)
    assert [event["seq"] > seen["recalled"] for event in seen["events"]] == [False, True]
    fresh = RunRecord(job())
    fresh.note("info", "submission", "early")
    fresh.recall(None, [])
    assert fresh.status(0)["recalled"] == 0, "its own early events are no earlier term's"


def test_what_was_lost_for_good_is_so_for_the_launch_that_lost_it(run: Run) -> None:
    assert run.record.deaths == 0
    for count in (1, 2):
        run.record.observe(m.Tick(), [m.Alert("info", "x", NOT_REPLACED, {"deaths": count})], BEGAN)
    run.record.observe(m.Begin(2), [], BEGAN)
    memo = json.loads(json.dumps(run.record.memo()))
    for launch, deaths in ((run.record._launch, 2), ("another", 0)):
        later = RunRecord(job())
        later.recall(memo, [], launch)
        assert later.deaths == deaths
    older = {key: value for key, value in memo.items() if not key.startswith("deaths")}
    later = RunRecord(job())
    later.recall(older, [], "another")
    assert later.deaths == 0


def test_the_status_says_where_the_runs_time_went(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.generation(1, "ab", 0, 2.0, "init")
    page = {"worker": "a", "rank": 0, "term": 1, "n": 1, "step": 7, "phase": "forward", "tokens": 0}
    page |= {"eval_step": -1, "eval_loss": math.nan, "baseline_loss": 0.0, "skipped_step": -1}
    page |= {"step_time_s": 1.0, "first_step_at_s": 0.0, "step_at_s": BEGAN + 10.0}
    monkeypatch.setattr(time, "time", lambda: BEGAN + 10.0)
    run.record.figures("node", [{**page, "phases_s": {"build": 1.0, "forward": 7.0}}])
    run.tell(12.0, m.WorkerExited("b", "process died"), run.outcome("a", 7))
    run.generation(2, "a", 7, 13.0)
    monkeypatch.setattr(time, "time", lambda: BEGAN + 14.0)
    status = run.record.status(0)
    seconds = {cause: s for cause, s in status["seconds"].items() if s}
    assert seconds == {"start": 3.0, "steps": 7.0, "detect": 2.0, "decide": 1.0, "rebuild": 1.0}
    assert (status["wall_s"], status["goodput"]) == (14.0, 0.5)
    (failure,) = status["failures"]
    assert (failure["detect_s"], failure["decide_s"], failure["recompute_s"]) == (2.0, 1.0, 0.0)
    later = RunRecord(job())
    later.recall(json.loads(json.dumps(run.record.memo())), [])
    assert later.status(0)["seconds"] == status["seconds"]
    summary = run.record.summary(m.Finish("finished"))
    assert summary["seconds"] == status["seconds"]
    assert sum(summary["seconds"].values()) == pytest.approx(summary["wall_s"])


def test_a_record_of_an_earlier_version_has_its_time_as_unknown(run: Run) -> None:
    run.generation(1, "ab", 0, 2.0, "init")
    run.tell(3.0, m.WorkerExited("a", "process died"))
    memo = json.loads(json.dumps(run.record.memo()))
    del memo["facts"]["account"]
    memo["wall_s"] = 40.0
    later = RunRecord(job())
    later.recall(memo, [])
    status = later.status(0)
    assert status["seconds"]["unknown"] == pytest.approx(40.0)
    assert status["failures"][0]["detect_s"] == 0.0
    later.observe(m.Tick(), [m.RunGeneration(run.spec)], BEGAN + 50.0)
    assert len(later.status(0)["failures"]) == 1
