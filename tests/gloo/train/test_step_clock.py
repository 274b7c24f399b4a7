"""The clock of steps on real layouts: phases add up, and who is slow shows where it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from picotron_ray.config.schema.telemetry import AXES, STEP_PHASES
from picotron_ray.layout.layout import Layout
from picotron_ray.train import step_clock
from picotron_ray.train.step_clock import CUDA_EVERY, CudaClock, Fed, HostClock, NoClock, StepTimes
from tests.support.gloo.parallel_jobs.matrix_jobs import make_job
from tests.support.gloo.pool import Pool
from tests.support.gloo.train_jobs.telemetry_jobs import timed_steps
from tests.support.selection import also_deep

STEPS, BATCH = 5, 8
PAUSE_S = 0.06
Ranks = list[list[tuple[StepTimes, float]]]


def test_collectives_inside_passes_are_not_seen_on_cuda() -> None:
    hidden = [Layout(dp=2, zero=z) for z in (1, 2, 3)] + [Layout(tp=2), Layout(dp=2, ep=2)]
    hidden += [Layout(cp=2), Layout(cp=2, zero=1), Layout(pp=2, dp=2, zero=1)]
    plain = [Layout(), Layout(dp=4), Layout(zero=3), Layout(dp=2, pp=2)]
    for device, expected in (("cuda", [False] * len(hidden)), ("cpu", [True] * len(hidden))):
        assert [step_clock.sees_waits(one, torch.device(device)) for one in hidden] == expected
        assert all(step_clock.sees_waits(one, torch.device(device)) for one in plain)


def take(pool: Pool, layout: Layout, slow_s: Mapping[int, float], stage: int | None = None) -> Ranks:
    job = make_job("sgd", BATCH, steps=STEPS)
    return pool.run(layout.world_size, timed_steps, job, layout, dict(slow_s), stage)


def phase_s(steps: list[tuple[StepTimes, float]], *phases: str) -> float:
    """Least over the steps but the first of the seconds of some phases: a busy machine only adds."""
    places = [STEP_PHASES.index(phase) for phase in phases]
    return min(sum(times.phase_s[place] for place in places) for times, _ in steps[1:])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, micro_batch=2),
        Layout(pp=2, micro_batch=2),
        *also_deep(
            Layout(micro_batch=2),
            Layout(dp=2, zero=2, micro_batch=2),
            Layout(tp=2, micro_batch=2),
            Layout(dp=2, pp=2, micro_batch=2),
            Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=2, micro_batch=2),
            Layout(pp=2, schedule="interleaved-zero-bubble", virtual_stages=2, micro_batch=2),
        ),
    ],
    ids=str,
)
def test_phases_add_up_to_the_step_as_it_is_seen_from_outside(pool: Pool, layout: Layout) -> None:
    for rank, steps in enumerate(take(pool, layout, dict.fromkeys(range(layout.world_size), 0.005))):
        for times, outside_s in steps:
            assert sum(times.phase_s) <= outside_s
            assert times.step_s == pytest.approx(sum(times.phase_s))
            assert min(times.phase_s) >= 0.0
        prepared_s = [
            abs(times.row_s * times.fed.computed_rows - sum(times.stage_s.values()) * times.fed.micro_batches)
            for times, _ in steps
        ]
        if layout.pp == 1:
            assert max(prepared_s) < 1e-9
        assert min(prepared_s) < 0.005, "of a pipeline it is the batch's preparation"
        missing = min(1 - times.step_s / outside_s for times, outside_s in steps)
        assert missing < 0.01, "a busy machine may stop a rank between two clocks, but not in every step"
        at = layout.coordinates(rank)
        assert [times.step for times, _ in steps] == list(range(1, STEPS + 1))
        assert tuple(steps[0][0].stage_s) == layout.rank_stages(at.pp)
        assert {times.fed.rows for times, _ in steps} == {BATCH // layout.dp}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=3, micro_batch=2),
        *also_deep(Layout(dp=2, micro_batch=2), Layout(tp=2, micro_batch=2)),
    ],
    ids=str,
)
def test_a_slow_rank_shows_in_its_seconds_per_row(pool: Pool, layout: Layout) -> None:
    """Its peers wait for it in reductions and gathers, and compute no longer."""
    ranks = take(pool, layout, {1: PAUSE_S})
    rows = [min(times.row_s for times, _ in steps[1:]) for steps in ranks]
    assert rows[1] > rows[0] + 0.5 * PAUSE_S / 2, "2 rows in a micro-batch"
    waits = [phase_s(steps, "reduce", "sync") for steps in ranks]
    micro_batches = layout.micro_batches(BATCH)
    assert waits[0] > waits[1] + 0.5 * PAUSE_S * micro_batches


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, micro_batch=2),
        *also_deep(Layout(dp=2, pp=2, micro_batch=2)),
    ],
    ids=str,
)
def test_a_slow_stage_shows_in_its_seconds_and_as_the_others_bubble(pool: Pool, layout: Layout) -> None:
    slow = {rank: PAUSE_S for rank in range(layout.world_size) if layout.coordinates(rank).pp == 1}
    ranks = take(pool, layout, slow)
    stages: dict[int, float] = {}
    for steps in ranks:
        for stage in steps[0][0].stage_s:
            stages[stage] = max(stages.get(stage, 0.0), min(times.stage_s[stage] for times, _ in steps[1:]))
    assert stages[1] > stages[0] + 0.8 * PAUSE_S
    micro_batches = layout.micro_batches(BATCH)
    bubbles = [phase_s(steps, "bubble") for steps in ranks]
    last = layout.world_size - 1
    assert bubbles[0] > bubbles[last] + 0.5 * PAUSE_S * (micro_batches - 1)


def test_one_virtual_stage_of_a_rank_is_told_from_its_other(pool: Pool) -> None:
    layout = Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=2, micro_batch=2)
    found: dict[int, float] = {}
    for steps in take(pool, layout, {0: PAUSE_S, 1: PAUSE_S}, stage=2):
        for stage in steps[0][0].stage_s:
            found[stage] = min(times.stage_s[stage] for times, _ in steps[1:])
    assert sorted(found) == [0, 1, 2, 3]
    assert found[2] > max(found[stage] for stage in (0, 1, 3)) + 0.8 * PAUSE_S


def test_rows_that_only_fill_are_computed_too(pool: Pool) -> None:
    """8 rows on 2 replicas in micro-batches of 3: 4 rows each, 6 with those that fill."""
    for steps in take(pool, Layout(dp=2, micro_batch=3), {}):
        assert {times.fed for times, _ in steps} == {Fed(4, 2, 6)}
        times, _ = steps[-1]
        places = [STEP_PHASES.index(phase) for phase in ("forward", "backward")]
        assert times.row_s == pytest.approx(sum(times.phase_s[place] for place in places) / 6)


def test_bytes_of_a_step_are_those_of_its_axes(pool: Pool) -> None:
    layout = Layout(dp=2, pp=2, micro_batch=2)
    ranks = take(pool, layout, {})
    job = make_job("sgd", BATCH)
    sequence, hidden = job.data.sequence_length, job.model.hidden_size
    crossing = layout.micro_batches(BATCH) * layout.micro_batch * sequence * hidden * 8
    for steps in ranks:
        for times, _ in steps:
            sent = dict(zip(AXES, times.sent_bytes, strict=True))
            assert sent["pp"] == crossing, "activations forward, or their gradients backward"
            assert sent["dp"] > 0
            assert sent["tp"] == sent["cp"] == sent["ep"] == 0


# --- clocks alone -------------------------------------------------------------------------------------------


def test_a_step_that_did_not_end_is_not_counted() -> None:
    found: list[StepTimes] = []
    clock = HostClock(found.append)
    clock.begin(1)
    clock.enter("forward")
    clock.begin(2)
    clock.end()
    assert [times.step for times in found] == [2]
    assert found[0].phase_s[STEP_PHASES.index("forward")] == 0.0


def test_steps_between_those_that_are_measured_cost_no_mark() -> None:
    found: list[StepTimes] = []
    clock = HostClock(found.append, every=3)
    for step in range(1, 10):
        clock.begin(step)
        clock.enter("forward")
        clock.waits(True)
        clock.waits(False)
        clock.end()
        clock.waits(True)  # between steps
    assert [times.step for times in found] == [3, 6, 9]
    assert found[0].phase_s[STEP_PHASES.index("reduce")] > 0


def test_no_clock_measures_nothing() -> None:
    clock = NoClock()
    clock.begin(1)
    clock.enter("forward", 3)
    clock.end()


class Event:
    """A CUDA event by the test's own clock; the device is ``late`` behind."""

    now_ms, passed_ms = 0.0, 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now_ms

    def query(self) -> bool:
        return self.at <= Event.passed_ms

    def elapsed_time(self, after: Event) -> float:
        assert after.query(), "the device has passed it"
        return after.at - self.at


def test_events_are_read_once_the_device_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **words: made.append(Event(**words)) or made[-1])
    found: list[StepTimes] = []
    clock = CudaClock(found.append)
    for step in range(4 * CUDA_EVERY + 1):
        clock.begin(step)
        for phase in ("forward", "backward", "optimizer"):
            Event.now_ms += 10.0
            clock.enter(phase)
        Event.now_ms += 10.0
        clock.end()
        Event.passed_ms = Event.now_ms - 50.0  # within the step before
        assert len(made) <= 2 * 5, "events are used again"
    assert [times.step for times in found] == [0, CUDA_EVERY, 2 * CUDA_EVERY, 3 * CUDA_EVERY], "late"
    assert all(times.step_s == pytest.approx(0.04) for times in found)
    assert found[0].phase_s[:3] == pytest.approx((0.01, 0.01, 0.01))


def test_a_device_that_falls_behind_costs_steps_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **words: made.append(Event(**words)) or made[-1])
    found: list[StepTimes] = []
    clock = CudaClock(found.append)
    Event.now_ms, Event.passed_ms = 1.0, 0.0
    for step in range(100):
        clock.begin(step)
        clock.end()
    assert found == []
    assert len(made) <= 2 * (step_clock.MOST_PENDING + 2)
