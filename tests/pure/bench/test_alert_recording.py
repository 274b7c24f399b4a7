"""Windows of recorded runs: whole ones of steps that follow each other, as far as these are timed."""

from __future__ import annotations

from typing import Any

import pytest

from picotron_ray.bench.alerts import recording
from picotron_ray.bench.alerts.recording import STEPS, Recorder, job_of, steps_apart
from picotron_ray.errors import ConfigError
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.telemetry_window import WARM_UP


class Row:
    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step, self.term, self.n, self.ordinal = rank, step, 1, 1, step - 1


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2)])
def test_each_rank_s_rows_become_windows(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipelines time every other step; a step that was written over unread costs its window."""
    monkeypatch.setattr(Recorder, "_window", lambda self, steps, more: steps)
    apart, recorder = steps_apart(layout), Recorder(layout)
    steps = [step for step in range(apart, 200, apart) if step >= WARM_UP + 1]
    missed = steps[STEPS + 1]
    for rank in range(2):
        rows: Any = tuple(Row(rank, step) for step in steps if (rank, step) != (1, missed))
        recorder.take(rows, {})
    found: Any = recorder.found
    assert found[0] == steps[:STEPS]
    assert all(missed not in window for window in found)
    assert len(found) > (len(steps) - 2 * STEPS) // STEPS - 1
    assert job_of("dp-fp32", 0, 100, __import__("pathlib").Path("x")).steps >= 100 * STEPS


def test_what_an_earlier_recording_left_and_cannot_be_removed_is_one_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run went on from there, and its recording had the rest alone."""
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "dp-fp32-0").write_text("a file, which no tree is")
    monkeypatch.setattr(recording.connect, "connect", lambda job: pytest.fail("the run began"))
    with pytest.raises(
        ConfigError, match="of an earlier recording cannot be removed: Not a directory; remove"
    ):
        recording.record("dp-fp32", 0, 100, tmp_path, print)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        recording.record("dp-fp32", 0, 100, tmp_path / "file" / "x", print)
