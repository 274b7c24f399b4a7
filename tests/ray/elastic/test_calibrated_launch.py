"""A second launch on the same machine knows what its steps will take."""

from __future__ import annotations

from pathlib import Path

import pytest

from picotron_ray.config.load import load_job
from tests.support.runs.ray_runs import run

pytestmark = [pytest.mark.usefixtures("connected"), pytest.mark.timeout(300), pytest.mark.deep]


def test_a_second_launch_is_estimated_within_a_quarter_of_what_is_measured(tmp_path: Path) -> None:
    """The first one's estimate is by assumed rates: several times off, and said to be so."""
    found = []
    for name in ("first", "second"):
        overrides = ["steps=80", "cluster.max_workers=2", "chaos=[]"]
        summary = run(load_job("quickstart", [f"name={name}", f"storage.url={tmp_path}", *overrides]))
        (generation,) = summary["generations"]
        found.append((generation["predicted_s"], generation["measured_s"]))
    for (predicted_s, measured_s), name in zip(found, ("first", "second"), strict=True):
        print(f"{name}: {predicted_s:.3g} s a step by estimate, {measured_s:.3g} s measured")
    predicted_s, measured_s = found[1]
    assert measured_s == pytest.approx(predicted_s, rel=0.25)
