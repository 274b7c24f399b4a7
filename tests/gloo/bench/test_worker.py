"""A process of ``bench mfu``: its place, its segments and what it notes, around a made-up training."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from picotron_ray.bench.common.event_log import Events
from picotron_ray.bench.mfu import worker
from picotron_ray.bench.mfu.settings import Setting, base_setting
from picotron_ray.bench.mfu.worker import Segments, WorkerPlace
from picotron_ray.data.batch import StepBatch
from picotron_ray.errors import PicotronError
from picotron_ray.train.passes import silent

CPU = torch.device("cpu")
BASE = base_setting("tiny", [], 1, "cpu")


class Training:
    """Notes the steps that it takes; the fifth costs the error that it was made with."""

    def __init__(self, error: Exception | None = None) -> None:
        self.steps: list[int] = []
        self.closed = 0
        self.error = error

    def step(self, batch: StepBatch, on_phase: Any = silent) -> float:
        self.steps.append(batch.step)
        if self.error and len(self.steps) == 5:
            raise self.error
        on_phase("forward")
        return 0.0

    def close(self) -> None:
        self.closed += 1


def segments(training: Training, monkeypatch: pytest.MonkeyPatch, base: Setting = BASE) -> Segments:
    plan = {"settings": [base.to_dict()], "steps": 3, "warmup": 2, "checkouts": {}}
    found = Segments(plan, WorkerPlace(0, 1, CPU))
    monkeypatch.setattr(found, "_training", lambda setting, groups: training)
    return found


def test_a_segment_times_the_steps_after_its_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    loaders: list[Any] = []
    made = worker.BatchLoader

    def loader(*arguments: Any, **named: Any) -> Any:
        loaders.append(made(*arguments, **named))
        return loaders[-1]

    closed: list[Any] = []
    monkeypatch.setattr(worker, "BatchLoader", loader)
    monkeypatch.setattr(made, "close", lambda self, close=made.close: (closed.append(self), close(self)))
    resets: list[torch.device] = []
    monkeypatch.setattr(worker, "reset_peak", resets.append)
    monkeypatch.setattr(worker, "peak_bytes", lambda device: 5)
    found = segments(training, monkeypatch).run("p", 0, phases=False)
    assert found.keys() == {"steps_s", "peak_bytes", "sent_bytes", "loss_sum"}
    assert (len(found["steps_s"]), found["peak_bytes"]) == (3, 5)
    assert training.steps == [1, 2, 3, 4, 5]
    assert (training.closed, closed, resets) == (1, loaders, [CPU])


@pytest.mark.parametrize(("pp", "phase"), [(1, "forward"), (2, "bubble")])
def test_phases_are_per_step_and_a_pipelines_stages_mark_their_own(
    pp: int, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, timed = Training(), []

    class Watch:
        def __init__(self, device: torch.device) -> None:
            self.seconds = {"data": 6.0, phase: 1.5}
            self.marks: list[str] = []
            watches.append(self)

        def mark(self, name: str) -> None:
            self.marks.append(name)

    watches: list[Watch] = []
    stages_timed = worker.stages_timed
    monkeypatch.setattr(worker, "Stopwatch", Watch)
    monkeypatch.setattr(worker, "stages_timed", lambda watch: (timed.append(watch), stages_timed(watch))[1])
    base = base_setting("tiny", [f"layout.pp={pp}"], pp, "cpu")
    found = segments(training, monkeypatch, base).run("p", 0, phases=True)
    assert found == {"phases_s": {"data": 2.0, phase: 0.5}, "applied": []}
    assert training.steps == [1, 2, 3, 4, 5]
    assert [watch.marks for watch in watches] == [["data", phase] * 3 + ["end"]]
    assert timed == (watches if pp == 2 else [])


@pytest.mark.parametrize("error", [PicotronError("no room\nat all"), torch.OutOfMemoryError("no room")])
def test_a_refusal_is_a_line_and_leaves_nothing_open(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(error)
    assert segments(training, monkeypatch).run("p", 0, phases=False) == {
        "refused": "no room",
        "by_peer": False,
    }
    assert training.closed == 1


def test_place_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert WorkerPlace.of("cpu") == WorkerPlace(5, 8, CPU)
    assert taken == []
    assert WorkerPlace.of("cuda") == WorkerPlace(5, 8, torch.device("cuda", 1))
    assert taken == [torch.device("cuda", 1)]


@pytest.mark.parametrize(
    ("world", "needed", "device", "backend"),
    [
        (1, False, "cpu", None),
        (1, True, "cpu", "gloo"),
        (2, False, "cpu", "gloo"),
        (2, False, "cuda", "nccl"),
    ],
)
def test_groups_are_opened_where_somebody_needs_them(
    world: int, needed: bool, device: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "29")
    calls: list[Any] = []

    class Groups:
        def close(self) -> None:
            calls.append("close")

    def opened(*arguments: Any) -> Groups:
        calls.append(arguments)
        return groups

    groups = Groups()
    monkeypatch.setattr(worker.ProcessGroups, "open", opened)
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    with WorkerPlace(0, world, torch.device(device)).groups("p", needed) as found:
        assert found is (groups if backend else None)
    assert calls == ([("host", 29, "p", 0, world, backend), "collect", "close"] if backend else [])


@pytest.mark.parametrize(("peak", "products"), [(None, 2), (3.0, 0)])
def test_what_a_process_notes(
    peak: float | None, products: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    asked: list[Any] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(gc, "freeze", lambda: asked.append("freeze"))
    monkeypatch.setattr(worker, "product_flops", lambda device, precision: (asked.append(precision), 9.0)[1])
    monkeypatch.setattr(Segments, "_training", lambda self, setting, groups: Training())
    order = [{"index": 0, "phases": False}, {"index": 0, "phases": True}]
    plan = {"settings": [BASE.to_dict()], "steps": 2, "warmup": 0, "checkouts": {}, "device": "cpu"}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**plan, "segments": order, "peak_tflops": peak}))
    worker.main(str(file), str(tmp_path / "events"))
    assert asked == [1, "freeze", *["fp32"] * products]
    place, *rest = Events(tmp_path / "events").read()
    assert (place["what"], place["rank"], place["device"], place["data_sheet"]) == ("place", 0, "cpu", None)
    assert [event["what"] for event in rest] == ((["product"] if products else []) + ["segment"]) * 2
    for event in rest:
        if event["what"] == "product":
            assert (event["size"], event["flops_per_s"]) == (1024, 9.0)
    timed, phases = (event for event in rest if event["what"] == "segment")
    assert (timed["number"], timed["index"], timed["phases"], len(timed["steps_s"])) == (0, 0, False, 2)
    assert (phases["number"], phases["index"], phases["phases"]) == (1, 0, True)
    assert phases["phases_s"].keys() == {"data", "forward"}


def test_a_mistake_is_noted_and_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"device": "cpu"}))
    with pytest.raises(KeyError):
        worker.main(str(file), str(tmp_path / "events"))
    (event,) = Events(tmp_path / "events").read()
    assert (event["what"], event["rank"], event["error"]) == ("failed", 3, "KeyError: 'settings'")


def test_a_gpus_name_and_its_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    base = base_setting("tiny", ["precision=bf16"], 1, "cpu")
    plan = {"settings": [base.to_dict()], "steps": 1, "warmup": 0, "checkouts": {}}
    found = Segments(plan, WorkerPlace(0, 1, torch.device("cuda", 0)))
    assert found.place() == {"device": "NVIDIA H200", "data_sheet": 989e12}
    monkeypatch.setattr(worker, "product_flops", lambda device, precision: 7.0)
    assert found.product() == {"size": 8192, "flops_per_s": 7.0}
