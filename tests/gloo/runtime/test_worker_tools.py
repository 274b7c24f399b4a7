"""Tools of workers while they train: recordings of steps, breakpoints, looks at values; losses stay."""

from __future__ import annotations

import gzip
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from picotron_ray.checkpoint.snapshot.slot_pool import list_slots
from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Member, Source
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.heartbeat import Page
from picotron_ray.runtime.worker.tools.window import RecordedSteps, WindowedTool
from picotron_ray.runtime.worker.tools.worker_tools import WorkerTools
from picotron_ray.train.loop import Loop, Requests
from picotron_ray.train.step_sync import HOLD
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import losses, terms
from tests.support.gloo.train_jobs.remesh_jobs import worker_name
from tests.support.gloo.train_jobs.tool_jobs import LEAST_STEPS, ordered

STEPS = 100_000
"""More than a run takes: it is stopped once its orders are carried out."""
LAYOUT = Layout(dp=2)
MODEL = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "layers": 2, "heads": 2}


def job_of(folder: Path, **sections: Any) -> JobConfig:
    tokens = np.random.default_rng(0).integers(0, 24, 6000).astype(np.uint16)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    data = {"source": "memmap", "path": str(folder / "tokens.bin"), "sequence_length": 8, "global_batch": 4}
    return JobConfig.model_validate(
        {
            "name": f"{folder.parent.name}-{folder.name}".replace("_", "-").lower()[-60:].strip("-"),
            "steps": STEPS,
            "precision": "fp64",
            "model": MODEL,
            "data": data,
            "optimizer": {"learning_rate": 3e-3, "schedule": {"kind": "constant"}},
            "checkpoint": {"interval_steps": 1_000_000},
            "evaluate": {"interval_steps": 1_000_000, "samples": 4},
            "snapshot": {"interval_steps": 1_000_000, "folder": str(folder)},
            **sections,
        }
    )


def run(pool: Pool, folder: Path, orders: list[dict[str, Any]], **sections: Any) -> Any:
    """(ledger's lines, answers by rank) of a run of two ranks that gets orders."""
    folder.mkdir(exist_ok=True)
    workers = pool.need(2)
    members = tuple(Member(worker_name(worker.pid), "node") for worker in workers)
    spec = GenerationSpec(GenerationId(next(terms), 1), members, LAYOUT, Source("init"), "test")
    found = pool.run(2, ordered, job_of(folder, **sections), spec, str(folder), orders)
    assert [(outcome.kind, outcome.detail) for outcome, _ in found] == [("interrupted", "")] * 2
    headers = [header for _, header in list_slots(folder)]
    lines = list(max(headers, key=lambda header: header.step).ledger)
    return losses(lines), [answers for _, answers in found]


ARM = {"what": "arm", "key": "k", "kind": "profile", "shapes": True, "stacks": False}
WINDOW = {"wait": 1, "warmup": 1, "active": 2}
READY = {"what": "state", "key": "k", "until": {"state": "done"}}


def test_a_profile_is_of_the_same_steps_on_all_its_ranks_and_changes_no_loss(
    pool: Pool, tmp_path: Path
) -> None:
    plain, _ = run(pool, tmp_path / "plain", [])
    go = {"what": "go", "key": "k", "rank": 1, "after_s": 0.1}
    second = {**ARM, **WINDOW, "rank": 0}
    found, answers = run(pool, tmp_path / "profiled", [{**ARM, **WINDOW}, second, go, READY])
    assert found[:LEAST_STEPS] == plain[:LEAST_STEPS]
    assert "one at a time" in answers[0][1]["refused"]
    first, other = answers[0][-1], answers[1][-1]
    assert first["steps"] == other["steps"]
    assert len(first["steps"]) == 2
    assert len(first["rounds"]) == len(other["rounds"]) > 1
    for answer in (first, other):
        with gzip.open(tmp_path / "profiled" / answer["file"]) as file:
            names = {event.get("name") for event in json.load(file)["traceEvents"]}
        assert {f"ProfilerStep#{step}" for step in first["steps"]} | {
            "forward",
            "backward",
            "reduce",
        } <= names


def test_a_break_on_one_rank_holds_all_of_them_and_changes_no_loss(pool: Pool, tmp_path: Path) -> None:
    plain, _ = run(pool, tmp_path / "plain", [])
    one = {"number": 1, "place": "phase:reduce", "condition": "loss > 0 and step >= 3", "timeout_s": 30.0}
    orders: list[dict[str, Any]] = [
        {"what": "break", "break": {**one, "ranks": [1]}},
        {"what": "breaks", "until": {"held": True}},
        {"what": "inspect", "scope": "model", "name": "embed"},
        {"what": "breaks", "after_s": 1.5},
        {"what": "rm", "number": 1, "after_s": 0.3},
        {"what": "continue"},
        {"what": "inspect", "scope": "model", "name": "", "after_s": 0.3},
    ]
    found, answers = run(pool, tmp_path / "held", orders)
    assert found[:LEAST_STEPS] == plain[:LEAST_STEPS]
    for rank in (0, 1):
        held, later = answers[rank][1], answers[rank][3]
        assert held["held_step"] == later["held_step"] == answers[1 - rank][1]["held_step"]
        assert later["page"]["step"] == held["held_step"]
        assert later["page"]["phase_limit_s"] >= 600
        assert answers[rank][2]["tensors"][0]["norm"] > 0
    assert answers[1][1]["hit"]["rank"] == 1
    assert answers[0][1]["hit"] is None
    assert answers[1][1]["held_step"] - answers[1][1]["hit"]["step"] <= 1


def test_a_recording_that_is_begun_while_all_stay_begins_with_the_next_step(
    pool: Pool, tmp_path: Path
) -> None:
    """Seen: right after another recording, whose end they stayed for, it never began."""
    one = {"number": 1, "place": "phase:reduce", "condition": "step >= 3", "timeout_s": 30.0, "ranks": [1]}
    orders: list[dict[str, Any]] = [
        {"what": "break", "break": one},
        {"what": "breaks", "until": {"held": True}},
        {"what": "arm", "key": "k", "kind": "times", **WINDOW},
        {"what": "go", "key": "k"},
        {"what": "rm", "number": 1, "after_s": 0.5},
        {"what": "continue"},
        READY,
    ]
    _, answers = run(pool, tmp_path / "run", orders)
    held = answers[0][1]["held_step"]
    steps = [answer[-1]["steps"] for answer in answers]
    assert steps[0] == steps[1]
    assert steps[0][0] > held


def line_of_loop() -> str:
    """A line that each step passes."""
    file = Path(__import__("picotron_ray.train.loop", fromlist=["loop"]).__file__)
    lines = enumerate(file.read_text().splitlines(), 1)
    return f"train/loop.py:{next(at for at, text in lines if 'loss = agreement.loss_sum' in text)}"


@pytest.mark.parametrize("condition", ["", "step >= 5"])
def test_a_line_holds_all_ranks_and_shows_its_values(pool: Pool, tmp_path: Path, condition: str) -> None:
    one = {"number": 1, "place": line_of_loop(), "condition": condition, "timeout_s": 1.0}
    orders: list[dict[str, Any]] = [
        {"what": "break", "break": {**one, "ranks": [0]}},
        {"what": "break", "break": {**one, "number": 2, "place": "train/loop.py:1"}},
        {"what": "breaks", "until": {"held": True}},
        {"what": "inspect", "scope": "local", "name": "grad_norm"},
        {"what": "inspect", "scope": "local", "name": "grad_nrm"},
        {"what": "inspect", "scope": "global", "name": ""},
        {"what": "inspect", "scope": "model", "name": "nosuch"},
        {"what": "rm", "number": 1},
        {"what": "breaks", "until": {"held": False}},
    ]
    _, answers = run(pool, tmp_path / "held", orders)
    first = answers[0]
    assert "run by no function; nearest line that is" in first[1]["refused"]
    assert first[2]["hit"]["function"] == "Loop._step"
    assert float(first[3]["values"]["grad_norm"]) > 0
    assert first[4]["refused"] == "inspect local: saw 'grad_nrm'; nearest: grad_norm"
    assert "math" in first[5]["values"]
    assert {"embed", "layers", "norm", "exp_avg/"} <= set(first[6]["begin"])
    assert first[8]["hit"] is None, "its second was over"


def test_all_ranks_are_patient_while_a_debugger_is_attached_to_one(pool: Pool, tmp_path: Path) -> None:
    """The test is the agent, whose socket debugpy connects to; nobody speaks with it."""
    with socket.create_server(("127.0.0.1", 0)) as agent, socket.create_server(("127.0.0.1", 0)) as later:
        attach = {"what": "attach", "port": agent.getsockname()[1], "agent": os.getpid()}
        again = {**attach, "port": later.getsockname()[1]}
        foreign = {**attach, "agent": 1}

        def leave() -> None:
            with agent.accept()[0]:
                time.sleep(5.0)
            with later.accept()[0]:
                time.sleep(1.0)

        person = threading.Thread(target=leave)
        person.start()
        never = {"number": 1, "place": line_of_loop(), "condition": "step > 1000000", "timeout_s": 30.0}
        line = {"what": "break", "break": never}
        orders: list[dict[str, Any]] = [
            {**line, "rank": 1},
            {**attach, "rank": 1},
            {"what": "rm", "number": 1, "rank": 1},
            {**foreign, "rank": 1, "until": {"refused": "attach: it was taken back"}},
            {**attach, "rank": 1},
            {**line, "rank": 1},
            {**attach, "rank": 1},
            {"what": "breaks", "rank": 0, "after_s": 3.0},
            {**again, "rank": 1, "until": {"attached": True}},
            {"what": "breaks", "rank": 0, "after_s": 14.0},
        ]
        _, answers = run(pool, tmp_path / "attached", orders, debug={"attach": True})
        person.join()
    assert "refused" not in answers[1][0]
    assert "a breakpoint watches a line" in answers[1][1]["refused"]
    assert answers[1][3]["refused"] == "attach: it was taken back", "the agent does not listen there"
    assert answers[1][4]["attached"] is True
    assert "a debugger is attached to this rank" in answers[1][5]["refused"]
    assert "attached to this rank already" in answers[1][6]["refused"]
    assert answers[0][0]["page"]["phase_limit_s"] == 270, "rank 0 waits for rank 1"
    assert answers[1][-1]["attached"] is True, "the first one is gone"


def test_no_debugger_is_attached_unless_the_config_says_so(pool: Pool, tmp_path: Path) -> None:
    _, answers = run(pool, tmp_path / "plain", [{"what": "attach", "port": 1, "agent": 1}])
    for of_rank in answers:
        assert of_rank[0]["refused"].startswith(
            "attach: debug.attach is off, since a debugger can run any code"
        )


def test_tools_hear_of_the_phases_of_the_thread_that_trains_alone(tmp_path: Path) -> None:
    """Seen: a slot's writer entered a phase in the midst of a profile, which ended the worker."""
    plain: list[str] = []
    heard: list[str] = []
    page: Any = SimpleNamespace(on_phase=lambda step, phase: plain.append(phase))
    tools = WorkerTools(job_of(tmp_path), page, "w", tmp_path, torch.device("cpu"), None)
    tools._listen("profile", lambda step, phase: heard.append(phase))
    page.on_phase(1, "forward")
    writer = threading.Thread(target=page.on_phase, args=(1, "snapshot"))
    writer.start()
    writer.join()
    tools._listen("profile", None)
    page.on_phase(1, "backward")
    assert (heard, plain) == (["forward"], ["forward", "snapshot", "backward"])


@pytest.mark.parametrize("dropped", [False, True])
def test_a_recording_that_begins_after_a_hold_is_the_one_that_was_told_to(
    tmp_path: Path, dropped: bool
) -> None:
    """``GO`` outlived a recording that was dropped, and began the next one where it was armed already."""
    job = job_of(tmp_path)
    page = Page(tmp_path / "w.page", job.elastic)
    tools, requests = WorkerTools(job, page, "w", tmp_path, torch.device("cpu"), None), Requests()
    alone: Any = SimpleNamespace(
        requests=requests, layout=Layout(), device=torch.device("cpu"), check_peers=lambda: None
    )
    tools.join(0, requests, alone)
    exchanges = 0

    def arm(key: str) -> WindowedTool:
        steps, nothing = RecordedSteps(0, 0, 2), SimpleNamespace(stop=lambda: None)
        return WindowedTool(key, steps, nothing, tmp_path / key, 1 << 20)  # type: ignore[arg-type]

    def flags_of_all() -> int:
        nonlocal exchanges
        exchanges += 1
        if exchanges == 1:
            tools._tool = arm("first")
            assert tools.order({"what": "go", "key": "first"})["state"] == "armed"
        if exchanges == 3 and dropped:
            tools.order({"what": "drop", "key": "first"})
            tools._tool = arm("second")
        return Loop._flags_of_all(alone) | (HOLD if exchanges < 5 else 0)

    tools.boundary(6, HOLD, flags_of_all)
    assert tools._tool is not None
    assert (tools._tool.key, tools._tool.state) == (("second", "armed") if dropped else ("first", "running"))
    assert page.least_limit_s == job.elastic.first_step_timeout_s
    tools.boundary(7, requests.take(), flags_of_all)
    assert (tools._tool.state == "running") is not dropped
