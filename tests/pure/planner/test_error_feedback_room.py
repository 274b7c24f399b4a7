"""Memory and slots of a run with compressed gradients: what they leave out is kept beside the moments."""

from __future__ import annotations

import pytest

from picotron_ray.config.load import load_job
from picotron_ray.layout.layout import Layout
from picotron_ray.planner.memory import memory_estimate
from picotron_ray.planner.snapshot_room import slot_estimate


@pytest.mark.parametrize("layout", [Layout(dp=4), Layout(dp=2, tp=2)], ids=str)
def test_two_more_buffers_in_memory_and_one_in_slots(layout: Layout) -> None:
    """Weights, gradients and AdamW's moments are four values per parameter, three of which slots hold."""
    exact = load_job("smollm-135m", ["data.path=/corpus"])
    compressed = load_job("smollm-135m", ["data.path=/corpus", "comm.gradients=int8"])
    before, after = memory_estimate(exact, layout), memory_estimate(compressed, layout)
    assert after.state_bytes / before.state_bytes == pytest.approx(6 / 4, rel=1e-3)
    assert after.kept_bytes / before.kept_bytes == pytest.approx(4 / 3, rel=1e-3)
    room = slot_estimate(compressed, layout) / slot_estimate(exact, layout)
    assert room == pytest.approx(4 / 3, rel=0.01)
