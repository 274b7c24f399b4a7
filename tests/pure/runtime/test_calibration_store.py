"""The history of measured runs on disk: read by the next launch and by `plan`, never in a run's way."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.coordinator import messages as m
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.hardware import hardware
from picotron_ray.runtime.calibrated_hardware import calibrated_hardware, correction_lines
from picotron_ray.runtime.calibration_store import CalibrationStore, load

JOB = JobConfig()


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def spec(n: int = 1) -> m.GenerationSpec:
    members = tuple(m.Member(f"w{at}", "a") for at in range(4))
    return m.GenerationSpec(
        m.GenerationId(1, n), members, Layout(dp=4, micro_batch=8), m.Source("init"), "start"
    )


def test_a_second_launch_is_corrected_by_the_first() -> None:
    first = CalibrationStore(JOB, "cpu")
    assert first.correction().why == ""
    first.add(spec(), 0.3, None, 0)
    found = CalibrationStore(JOB, "cpu").correction()
    assert found.rows[-1].corrected_s(found.factors) == pytest.approx(0.3, rel=0.01)
    assert "1 measured generation of this model" in found.why


def test_a_generation_is_told_of_again_with_its_phases() -> None:
    store = CalibrationStore(JOB, "cpu")
    store.add(spec(), 0.3, None, 0)
    store.add(spec(), 0.4, m.RunFigures(50, 60, 0.4, {"reduce": 0.1, "data": 0.05}), 10**9)
    (kept,) = (load(store.path) or pytest.fail("no history")).measures
    assert (kept.step_s, kept.reduce_s, kept.waits_s, kept.device_bytes) == (0.4, 0.1, 0.05, 10**9)


def test_a_reduction_that_waits_cannot_be_told_from_is_not_kept() -> None:
    """FSDP2 waits for its sums inside the backward pass: what is left after it is no measure of links."""
    store = CalibrationStore(JOB, "cuda")
    unseen = m.RunFigures(50, 60, 0.4, {"reduce": 0.002, "data": 0.05}, waits_seen=False)
    store.add(spec(), 0.4, unseen, 10**9)
    (kept,) = (load(store.path) or pytest.fail("no history")).measures
    assert (kept.reduce_s, kept.waits_s) == (0.0, 0.05)


@pytest.mark.parametrize("content", ["", "{", '{"version": 7}', "[]", "\x00"])
def test_a_damaged_file_counts_as_none_and_is_replaced(content: str) -> None:
    store = CalibrationStore(JOB, "cpu")
    store.path.parent.mkdir(parents=True)
    store.path.write_text(content)
    assert store.correction().why == ""
    store.add(spec(), 0.3, None, 0)
    assert store.correction().why


def test_a_folder_that_cannot_be_written_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = CalibrationStore(JOB, "cpu")
    store.path.parent.parent.mkdir(parents=True)
    store.path.parent.write_text("in the way")
    store.add(spec(), 0.3, None, 0)
    assert "is not kept" in caplog.text


def test_plan_says_by_what_it_was_corrected() -> None:
    store = CalibrationStore(JOB, "cuda")
    store._hardware = "NVIDIA H100 80GB HBM3"
    store.path = store.path.with_name("cuda-nvidia-h100.json")
    store.add(spec(), 0.3, None, 0)
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
        calibrated_hardware(hardware("h100-80g"), JOB, 4, str(store.path))
    with pytest.raises(ConfigError, match=r"expected auto, none, or a file"):
        calibrated_hardware(hardware("h100-80g"), JOB, 4, str(tmp_path / "nothing.json"))
