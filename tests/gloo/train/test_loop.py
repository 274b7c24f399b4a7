"""A loop over parts that are made up: what is done when, told to the page and written into the ledger."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from picotron_ray.checkpoint.snapshot.ledger_tail import LedgerTail
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.config.schema.optimizer import ScheduleConfig
from picotron_ray.layout.layout import Layout
from picotron_ray.train import loop as module
from picotron_ray.train.expert_balance import ExpertLoad
from picotron_ray.train.loop import Loop, Requests
from picotron_ray.train.step_sync import SNAPSHOT, STOP
from picotron_ray.train.update_policy import UpdatePolicy
from picotron_ray.train.way_selection import NO_COSTS, Cost
from tests.support.gloo.parallel_jobs.matrix_jobs import CPU, make_job

OLD = '{"step":0}'
DIGEST = bytes(range(16))


class Parts:
    """Engine, loader, snapshots and page of a loop, which keep one log."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.requests = Requests()
        self.load = ExpertLoad()
        self.in_evaluation = 0  # flag that is raised meanwhile
        self.apart_s = self.waited_s = self.pinned_wait_s = 0.25
        self.sealed_step, self.computing_step = 1, 0
        self.adaptation = self
        self.raised: list[str] = []

    def changes(self) -> dict[str, list[str]]:
        found, self.raised = self.raised, []
        return {"raised": found} if found else {}

    def next(self) -> Any:
        return SimpleNamespace(
            rows=(0, 4),
            digest=DIGEST,
            global_tokens=32,
            loss_tokens=32,
            tokens=np.zeros((1, 4, 9)),
            stage=0,
            tokens_until=32 * self.computing_step,
        )

    def gradients_of(self, batch: Any, on_phase: Callable[[str], None]) -> tuple[float, float]:
        on_phase("forward")
        return 64.0, 1.5

    def optimizer_step(self, rate: float) -> None:
        self.log.append(("update", rate))

    def comm_costs(self) -> tuple[Cost, ...]:
        return (Cost(8.0, 0.125), *NO_COSTS[1:])

    def choose_ways(self, costs: Sequence[Cost]) -> dict[str, tuple[float, float]]:
        assert costs == self.comm_costs()
        return {"gradients": (0.25, 0.125)}

    def settle(self) -> None:
        self.log.append("settle")

    def expert_load(self) -> ExpertLoad:
        return self.load

    def evaluate(
        self, batches: Sequence[Any], averaged: bool = False, adapted: bool = True
    ) -> tuple[float, int]:
        self.requests.add(self.in_evaluation)
        return 10.0, 7

    def wait_copied(self) -> None:
        self.log.append("wait_copied")

    def wait_sealed(self) -> None:
        self.log.append("wait_sealed")

    def observe(self, sealed: int) -> None:
        self.log.append(("observe", sealed))

    def begin(self, step: int, tail: Sequence[str], pinned: bool) -> None:
        self.log.append(("begin", step, len(tail), pinned))

    def flush(self, step: int, tail: Sequence[str], pinned: bool) -> None:
        self.log.append(("flush", step, len(tail), pinned))

    def phase(self, name: str) -> None:
        self.log.append(name)

    def put(self, **values: float) -> None:
        self.log.append(values)

    def communication(self, figures: dict[str, tuple[float, float]]) -> None:
        assert figures == {"gradients": (0.25, 0.125)}

    def count_step(self, seconds: float) -> None:
        self.log.append(("count", seconds))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Parts:
    """A step takes 0.5 s by the clock: it is read at its beginning and end."""
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "monotonic", lambda: next(ticks) * 0.5)
    monkeypatch.setattr(module.time, "time", lambda: 1234.56789)
    return Parts()


def job_of(steps: int, **intervals: Any) -> JobConfig:
    job = make_job("sgd", 4)
    optimizer = job.optimizer.model_copy(update={"schedule": ScheduleConfig(kind="constant")})
    sections = {"evaluate": 100, "checkpoint": 100, "snapshot": 100} | intervals
    update: dict[str, Any] = {"steps": steps, "optimizer": optimizer}
    for name, interval in sections.items():
        update[name] = getattr(job, name).model_copy(update={"interval_steps": interval})
    return job.model_copy(update=update)


def loop(parts: Any, job: JobConfig, start: int) -> Loop:
    held_out: Any = [SimpleNamespace(loss_tokens=16), SimpleNamespace(loss_tokens=4)]
    identity = {"term": 3, "n": 7}
    asked, tail = (parts, parts.requests, UpdatePolicy(job)), LedgerTail()
    tail.restore([OLD])
    return Loop(job, Layout(), identity, 0, CPU, parts, parts, held_out, parts, *asked, tail, start)


def told(parts: Parts, *kinds: str) -> list[Any]:
    return [entry for entry in parts.log if isinstance(entry, tuple) and entry[0] in kinds]


def evaluated(parts: Parts) -> list[int]:
    return [entry["eval_step"] for entry in parts.log if isinstance(entry, dict) and "eval_step" in entry]


STEP = [
    "data",
    "forward",
    "sync",
    "wait_copied",
    {"clean": -1},
    "optimizer",
    ("update", 0.05),
    ("observe", 1),
]


def test_a_step_from_its_data_to_the_page(parts: Parts) -> None:
    made = loop(parts, job_of(4), 2)
    assert made.run() == "finished"
    step = [*STEP[:-1], {"loss": 2.0, "grad_norm": 1.5}, STEP[-1]]
    figures = {
        "padding_ratio": 0.0,
        "stage": 0,
        "learning_rate": 0.05,
        "sealed": 1,
        "complete": 1,
        "wait_s": 0.25,
        "pinned_wait_s": 0.25,
    }
    first = [
        {"tokens": 96, **figures},
        {"clean": 3},
        {"first_step_at_s": 1234.56789},
        ("count", 0.5),
        {"step": 3},
    ]
    second = [{"tokens": 128, **figures}, {"clean": 4}, ("count", 0.5), {"step": 4}]
    end = ["evaluate", {"eval_loss": 0.5, "eval_step": 4}]
    flush = ["flush", "wait_sealed", ("observe", 1), "settle", ("flush", 4, 3, True)]
    assert parts.log == [*step, *first, *step, *second, *end, *flush]
    assert parts.computing_step == 4
    assert made.tail.lines()[0] == OLD
    assert json.loads(made.tail.lines()[1]) == {
        "step": 3,
        "term": 3,
        "n": 7,
        "samples": [8, 12],
        "rows": [[0, 4, DIGEST.hex()]],
        "tokens": 32,
        "loss": 2.0,
        "grad_norm": 1.5,
        "learning_rate": 0.05,
        "at_s": 1234.568,
    }
    assert " " not in made.tail.lines()[1]


def test_experts_are_told_of_where_there_are_any(parts: Parts) -> None:
    parts.load = ExpertLoad(torch.tensor(2.5, dtype=torch.float64), torch.tensor(7.0, dtype=torch.float64))
    made = loop(parts, job_of(3), 2)
    made.run()
    line = json.loads(made.tail.lines()[1])
    assert (line["expert_imbalance"], line["dropped"]) == (2.5, 7)


def test_parts_that_rise_are_in_the_ledger_and_the_log(parts: Parts) -> None:
    made, said = loop(parts, job_of(4), 2), list[str]()
    made.tell, parts.raised = said.append, ["head", "layers.0.mlp"]
    made.run()
    lines = [json.loads(line) for line in made.tail.lines()]
    assert [line.get("precision") for line in lines[1:]] == [{"raised": ["head", "layers.0.mlp"]}, None]
    assert said == ["step 3: precision of head, layers.0.mlp raised"]


def test_snapshots_checkpoints_and_evaluations_at_their_steps(parts: Parts) -> None:
    assert loop(parts, job_of(8, evaluate=2, checkpoint=5, snapshot=2), 2).run() == "finished"
    assert told(parts, "begin") == [("begin", 4, 3, False), ("begin", 5, 4, True), ("begin", 7, 6, False)]
    assert evaluated(parts) == [4, 6, 8]
    at = parts.log.index(("begin", 5, 4, True))
    assert parts.log[at - 2 : at] == ["wait_copied", "settle"], "replicas agree on what a checkpoint holds"
    assert parts.log.count("settle") == 2, "before checkpoints and at the end alone"
    assert told(parts, "flush") == [("flush", 8, 7, True)], "the last step has no other snapshot"


def test_a_commit_that_may_be_the_best_has_the_figures_of_its_own_step(parts: Parts) -> None:
    """They are measured before its snapshot, which carries them, and are gone with the next update."""
    job = job_of(9, evaluate=2, checkpoint=4)
    kept = job.checkpoint.model_copy(update={"keep_best": "eval_loss"})
    made = loop(parts, job.model_copy(update={"checkpoint": kept}), 2)
    made.eval_sets = [[SimpleNamespace(loss_tokens=5)]]
    carried: list[Any] = []
    begin = parts.begin

    def noted(step: int, tail: Sequence[str], pinned: bool) -> None:
        carried.append((step, pinned, made.evaluated.extra()))
        begin(step, tail, pinned)

    parts.begin = noted  # type: ignore[method-assign]
    made.run()
    figures = {"evaluation": {"eval_loss": 0.5}}
    assert carried == [(4, True, figures), (8, True, figures)]
    assert evaluated(parts) == [4, 6, 8, 9]
    assert {"eval_sets": 1, "eval_set_0": 2.0} in parts.log


def test_the_interval_of_snapshots_follows_their_cost(parts: Parts) -> None:
    """The first step knows no time; then 2 s apart in steps of 0.5 s is one in four."""
    parts.apart_s = 2.0
    loop(parts, job_of(9, snapshot="auto"), 2).run()
    assert [step for _, step, *_ in told(parts, "begin")] == [3, 7]


def test_a_request_to_stop_ends_with_a_snapshot(parts: Parts) -> None:
    parts.requests.add(STOP)
    assert loop(parts, job_of(9, evaluate=1, snapshot=1), 2).run() == "interrupted"
    assert told(parts, "begin", "flush") == [("flush", 3, 2, True)]
    assert evaluated(parts) == []
    assert parts.requests.take() == 0


def test_a_request_during_an_evaluation_is_for_the_next_step(parts: Parts) -> None:
    parts.in_evaluation = SNAPSHOT
    loop(parts, job_of(6, evaluate=4), 2).run()
    assert told(parts, "begin") == [("begin", 5, 4, True)]


@pytest.mark.parametrize("start", [2, 5])
def test_nothing_is_left_to_train(parts: Parts, start: int) -> None:
    parts.sealed_step = 9
    made = loop(parts, job_of(2), start)
    assert made.run() == "finished"
    assert told(parts, "update", "begin", "flush", "observe") == [("observe", 9), ("flush", start, 1, True)]
    assert evaluated(parts) == [start]


def test_flags_are_raised_together_and_taken_once() -> None:
    requests = Requests()
    requests.add(STOP)
    requests.add(SNAPSHOT)
    requests.add(STOP)
    assert [requests.take(), requests.take()] == [STOP | SNAPSHOT, 0]
