"""The planner's process answers, is replaced where it dies or hangs, and is nobody's to wait for."""

from __future__ import annotations

import io
import json
import queue
import sys
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from picotron_ray.config.load import parse_job
from picotron_ray.coordinator.messages import LayoutQuestion, Planned
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.search import choose_layout
from picotron_ray.runtime.planning import process
from picotron_ray.runtime.planning.process import MOST_TRIES, PlannerProcess
from picotron_ray.runtime.planning.server import serve
from tests.support.checkpoint.open_files import a_thousand_open_files

JOB = parse_job({"data": {"global_batch": 8}})
FOUR = LayoutQuestion(4, (4,))
ANSWER = {"layout": Layout(dp=2).to_dict(), "cost_s": 1.0, "reason": "r", "runner_up": "", "planned_s": 0.5}
ONE_BY_ONE = (
    "import sys, os\nsys.stdin.readline()\nfor line in iter(sys.stdin.readline, ''):\n"
    f"    print({json.dumps(ANSWER)!r}, flush=True)\n"
)
DYING = "import sys\nsys.stdin.readline(); sys.stdin.readline(); sys.exit(7)"
SILENT = "import sys, time\nsys.stdin.readline(); sys.stdin.readline(); time.sleep(60)"


class Ears:
    """A planner's process with what it reports."""

    def __init__(self, program: str, limit_s: float = 20.0) -> None:
        self.heard: queue.Queue[Planned] = queue.Queue()
        command = (sys.executable, "-S", "-E", "-c", program)
        self.process = PlannerProcess(JOB, "cpu", self.heard.put, command, limit_s)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Ears]]:
    monkeypatch.setattr(process, "RESTART_PAUSE_S", 0.0)
    found: list[Ears] = []
    yield found
    for ears in found:
        ears.process.close()


def test_the_server_answers_what_the_search_finds() -> None:
    head = json.dumps({"job": JOB.model_dump(mode="json"), "device": "cpu"})
    none = LayoutQuestion(4, (4,), 0, 1)
    out = io.StringIO()
    serve([head, json.dumps(asdict(FOUR)), json.dumps(asdict(none))], out)
    first, second = map(json.loads, out.getvalue().splitlines())
    planned = choose_layout(JOB, 4, node_sizes=(4,))
    assert Layout.from_dict(first["layout"]) == planned.layout
    assert (first["cost_s"], first["reason"], first["runner_up"]) == (
        planned.cost_s, planned.reason, planned.runner_up,
    )  # fmt: skip
    assert second["layout"] is None
    assert second["reason"].startswith("layout: saw room for 1e-09 GB per worker, below layouts that ran out")


def test_answers_come_in_the_order_of_the_questions(made: list[Ears]) -> None:
    ears = Ears(ONE_BY_ONE)
    made.append(ears)
    ears.process.ask([FOUR, LayoutQuestion(3)])
    assert [ears.heard.get(timeout=20).question for _ in range(2)] == [FOUR, LayoutQuestion(3)]


def test_a_planner_that_is_started_beside_a_thousand_connections_answers(made: list[Ears]) -> None:
    with a_thousand_open_files():
        ears = Ears(ONE_BY_ONE)
        made.append(ears)
        ears.process.ask([FOUR])
        assert ears.heard.get(timeout=20).layout == Layout(dp=2)


def test_a_process_that_was_killed_is_replaced_and_the_question_put_again(made: list[Ears]) -> None:
    ears = Ears(ONE_BY_ONE)
    made.append(ears)
    ears.process.ask([FOUR])
    assert ears.heard.get(timeout=20).layout == Layout(dp=2)
    before = ears.process._process
    assert before is not None
    before.kill()
    before.wait()
    ears.process.ask([LayoutQuestion(3)])
    assert ears.heard.get(timeout=20) == Planned(LayoutQuestion(3), Layout(dp=2), 1.0, "r", "", 0.5)
    assert ears.process.pid != before.pid


@pytest.mark.parametrize(
    ("program", "limit_s", "why"),
    [(DYING, 20.0, "it ended with 7"), (SILENT, 0.02, "no answer within 0.02 s")],
)
def test_a_question_that_kills_or_hangs_the_planner_ends_in_an_error(
    made: list[Ears], program: str, limit_s: float, why: str
) -> None:
    ears = Ears(program, limit_s)
    made.append(ears)
    ears.process.ask([FOUR])
    heard = ears.heard.get(timeout=20)
    assert heard == Planned(FOUR, error=f"the planner failed {MOST_TRIES} times ({why})")


def test_close_ends_the_process_and_silences_it(made: list[Ears]) -> None:
    ears = Ears(SILENT)
    ears.process.ask([FOUR])
    while (running := ears.process._process) is None:
        pass
    ears.process.close()
    assert running.wait(timeout=20) != 0
    with pytest.raises(queue.Empty):
        ears.heard.get(timeout=0.05)
