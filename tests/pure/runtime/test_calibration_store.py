"""The history of measured runs on disk: read by the next launch and by `plan`, never in a run's way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.coordinator.calibration import CALIBRATION
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.calibration import NONE
from picotron_ray.planner.calibration_history import RunMeasure
from picotron_ray.planner.hardware import hardware
from picotron_ray.runtime.calibrated_hardware import calibrated_hardware, correction_lines
from picotron_ray.runtime.calibration_store import CalibrationStore, load
from picotron_ray.runtime.coordinator.calibrations import Calibrations
from picotron_ray.runtime.coordinator.run_record import RunRecord

JOB = JobConfig()


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def spec(n: int = 1) -> m.GenerationSpec:
    members = tuple(m.Member(f"w{at}", "a") for at in range(4))
    return m.GenerationSpec(
        m.GenerationId(1, n), members, Layout(dp=4, micro_batch=8), m.Source("init"), "start"
    )


def kept_in(store: CalibrationStore, hardware: str = "") -> tuple[RunMeasure, ...]:
    found = load(store.path(hardware) or pytest.fail("no path"))
    return () if found is None else found.measures


def test_cards_of_different_kinds_have_histories_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    """Seen: a head node without a GPU kept A100s and H100s in one file, and corrected each by the other."""
    store = CalibrationStore(JOB, "cuda")
    store.add(spec(), 1.0, None, 80 * 10**9, "NVIDIA H100 80GB HBM3")
    store.add(spec(), 3.0, None, 40 * 10**9, "NVIDIA A100-SXM4-40GB")
    assert [one.step_s for one in kept_in(store, "NVIDIA H100 80GB HBM3")] == [1.0]
    assert [one.step_s for one in kept_in(store, "NVIDIA A100-SXM4-40GB")] == [3.0]
    store.add(spec(), 9.0, None, 0, "")
    store.add(spec(), 9.0, None, 0, "")
    assert caplog.text.count("no node tells which GPUs it has") == 1
    assert len(list((store.path("x") or pytest.fail("no path")).parent.glob("*.json"))) == 2
    assert store.like("H100") == store.path("NVIDIA H100 80GB HBM3")
    assert store.like("B200") is store.like("") is None
    store.add(spec(), 1.5, None, 80 * 10**9, "NVIDIA H100 PCIe")
    assert store.like("H100") is None, "which of them it is nobody knows"


def traits(node: str, hardware: str) -> m.NodeTraits:
    return m.NodeTraits(node, 80 * 10**9, has_gpus=True, hardware=hardware)


@pytest.mark.parametrize(
    ("heard", "ray", "expected"),
    [
        (("NVIDIA H100",), "A100", "NVIDIA H100"),  # what agents say goes first
        (("NVIDIA A100", "NVIDIA H100"), "", None),  # mixed: no such history
        ((), "H100", "NVIDIA H100"),
        ((), "L4", None),
        ((), "", None),
    ],
)
def test_a_head_without_a_gpu_goes_by_its_nodes(
    heard: tuple[str, ...], ray: str, expected: str | None
) -> None:
    store = CalibrationStore(JOB, "cuda")
    for name in ("NVIDIA H100", "NVIDIA A100"):
        store.add(spec(), 0.3, None, 80 * 10**9, name)
    nodes: list[Any] = [SimpleNamespace(accelerator=ray), SimpleNamespace(accelerator="")]
    record = RunRecord(JOB)
    there = Calibrations(JOB, "cuda", record, lambda work: work.close(), lambda: nodes)
    begin = m.Begin(1, traits=tuple(traits(f"n{at}", name) for at, name in enumerate(heard)))
    found = asyncio.run(there.begin(begin))
    told = [event["text"] for event in record.status(0)["events"] if event["kind"] == CALIBRATION]
    assert (found.calibration != NONE) == bool(expected)
    assert str(store.path(expected)) in told[0] if expected else told[0].startswith("no run was measured")


def test_a_second_launch_is_corrected_by_the_first() -> None:
    first = CalibrationStore(JOB, "cpu")
    assert first.correction(first.path()).why == ""
    first.add(spec(), 0.3, None, 0)
    found = CalibrationStore(JOB, "cpu").correction(first.path())
    assert found.rows[-1].corrected_s(found.factors) == pytest.approx(0.3, rel=0.01)
    assert "1 measured generation of this model" in found.why


def test_a_generation_is_told_of_again_with_its_phases() -> None:
    store = CalibrationStore(JOB, "cpu")
    store.add(spec(), 0.3, None, 0)
    store.add(spec(), 0.4, m.RunFigures(50, 60, 0.4, {"reduce": 0.1, "data": 0.05}), 10**9)
    (kept,) = kept_in(store)
    assert (kept.step_s, kept.reduce_s, kept.waits_s, kept.device_bytes) == (0.4, 0.1, 0.05, 10**9)


def test_a_reduction_that_waits_cannot_be_told_from_is_not_kept() -> None:
    """FSDP2 waits for its sums inside the backward pass: what is left after it is no measure of links."""
    store = CalibrationStore(JOB, "cuda")
    unseen = m.RunFigures(50, 60, 0.4, {"reduce": 0.002, "data": 0.05}, waits_seen=False)
    store.add(spec(), 0.4, unseen, 10**9, "NVIDIA H100")
    (kept,) = kept_in(store, "NVIDIA H100")
    assert (kept.reduce_s, kept.waits_s) == (0.0, 0.05)


@pytest.mark.parametrize("content", ["", "{", '{"version": 7}', "[]", "\x00"])
def test_a_damaged_file_counts_as_none_and_is_replaced(content: str) -> None:
    store = CalibrationStore(JOB, "cpu")
    path = store.path() or pytest.fail("no path")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert store.correction(path).why == ""
    store.add(spec(), 0.3, None, 0)
    assert store.correction(path).why


def test_a_folder_that_cannot_be_written_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = CalibrationStore(JOB, "cpu")
    path = store.path() or pytest.fail("no path")
    path.parent.parent.mkdir(parents=True)
    path.parent.write_text("in the way")
    store.add(spec(), 0.3, None, 0)
    assert "is not kept" in caplog.text


def test_plan_says_by_what_it_was_corrected() -> None:
    store = CalibrationStore(JOB, "cuda")
    store.add(spec(), 0.3, None, 0, "NVIDIA H100 80GB HBM3")
    devices = hardware("h100-80g")
    fixed, found, path = calibrated_hardware(devices, JOB, 4, "auto")
    assert found.factors.compute > 1
    assert fixed.profile.flops < devices.profile.flops
    lines = list(correction_lines(found, path))
    assert lines[0].startswith("calibrated computing x ")
    assert "took 0.3 s a step, by the model" in lines[1]
    assert calibrated_hardware(devices, JOB, 4, "none")[0] is devices
    assert calibrated_hardware(hardware("a100-80g"), JOB, 4, "auto")[1].why == ""


def test_a_file_of_another_device_is_refused(tmp_path: Path) -> None:
    store = CalibrationStore(JOB, "cpu")
    store.add(spec(), 0.3, None, 0)
    with pytest.raises(ConfigError, match=r"expected some on cuda"):
        calibrated_hardware(hardware("h100-80g"), JOB, 4, str(store.path()))
    with pytest.raises(ConfigError, match=r"expected auto, none, or a file"):
        calibrated_hardware(hardware("h100-80g"), JOB, 4, str(tmp_path / "nothing.json"))
