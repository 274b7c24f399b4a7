"""A short run that adapts; `test_adaptation` has the figures that matter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs.adapting_runs import adapting, sleeps

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(200), pytest.mark.deep]


def test_rows_follow_the_speed_of_their_workers(tmp_path: Path) -> None:
    """One of two sleeps four times as long per row: four rows each become six and two."""
    held = ("layout.dp=2", "layout.tp=1", "layout.pp=1", "layout.zero=0", "layout.micro_batch=4")
    run = adapting(
        tmp_path,
        "short",
        *("steps=180", "data.global_batch=8", "cluster.max_workers=2", "adapt.apply=[rows]", *held),
        chaos=sleeps(0.01, 0.04),
    )
    assert run.summary["failures"] == []
    assert run.decisions == [("apply", "rows"), ("kept", "rows")]
    assert run.layouts[-1].endswith("rows6_2")
    assert run.step_s(run.last_start() + 5, 180) < 0.9 * run.step_s(5, 50)
