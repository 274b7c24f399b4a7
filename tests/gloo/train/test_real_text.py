"""The loss curve on real text, long enough for small errors to grow: every layout against one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from picotron_ray.config.schema.job import JobConfig
from picotron_ray.layout.layout import Layout
from tests.support.gloo.pool import Pool
from tests.support.gloo.runs import Run, losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 200
BOUND = {"fp64": 1e-9, "fp32": 3e-2}  # of fp32 the figures count: rounding grows with the curve (1.1e-2 seen)
LAYOUTS = [
    Layout(dp=2, micro_batch=4),
    Layout(dp=2, tp=2, zero=3, micro_batch=4),
    Layout(pp=2, micro_batch=4),
    Layout(cp=2, zero=1, micro_batch=8),
    Layout(tp=2, pp=2, schedule="zbv", virtual_stages=2, micro_batch=2),
    Layout(dp=3, zero=2, micro_batch=3),
]


def job_of(folder: Path, precision: str) -> JobConfig:
    """A small decoder on the standard library's source."""
    folder.mkdir()
    return JobConfig.model_validate(
        {
            "name": folder.name.lower(),
            "steps": STEPS,
            "precision": precision,
            "model": {"hidden_size": 32, "intermediate_size": 64, "layers": 4, "heads": 4},
            "data": {"sequence_length": 32, "global_batch": 8},
            "optimizer": {"learning_rate": 3e-3, "schedule": {"warmup_steps": 20}},
            "checkpoint": {"interval_steps": 1000},
            "evaluate": {"interval_steps": 1000, "samples": 8},
            "snapshot": {"interval_steps": 50, "folder": str(folder)},
        }
    )


def curve(pool: Pool, folder: Path, precision: str, layout: Layout) -> np.ndarray:
    run = Run(pool, job_of(folder, precision), folder)
    run.finish(layout)
    found = np.array(losses(run.ledger()))
    assert found.shape == (STEPS,)
    return found


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_the_curve_of_every_layout_is_that_of_one_process(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    expected = curve(pool, tmp_path / "alone", precision, Layout(micro_batch=8))
    assert expected[-1] < 0.7 * expected[0], "it learns"
    lines = [f"{precision}, {STEPS} steps, loss {expected[0]:.3f} -> {expected[-1]:.3f}; largest difference:"]
    for number, layout in enumerate(LAYOUTS):
        apart = np.abs(curve(pool, tmp_path / f"run{number}", precision, layout) / expected - 1)
        lines.append(f"  {apart[:100].max():.1e} in 100 steps, {apart.max():.1e} in all, {layout}")
        assert apart.max() < BOUND[precision], layout
    with capsys.disabled():
        print("\n" + "\n".join(lines))
