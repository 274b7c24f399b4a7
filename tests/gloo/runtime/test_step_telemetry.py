"""A worker's telemetry: from the marks of a step to the row that its agent reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from picotron_ray.coordinator.messages import GenerationId, GenerationSpec, Member, Source
from picotron_ray.layout.layout import Layout
from picotron_ray.runtime.ray_cluster.host_memory import host_bytes
from picotron_ray.runtime.telemetry_page import NO_MEMORY, MemoryFigures, read_rows
from picotron_ray.runtime.worker import step_telemetry as module
from picotron_ray.runtime.worker.step_telemetry import DeviceMemory, generation_clock, make_page
from picotron_ray.train.step_clock import NoClock

CPU = torch.device("cpu")
LAYOUT = Layout(pp=2, schedule="interleaved-1f1b", virtual_stages=2)
SPEC = GenerationSpec(
    GenerationId(2, 3), (Member("a", "n1"), Member("b", "n1")), LAYOUT, Source("init", 40), ""
)


def step(clock: NoClock, number: int) -> None:
    clock.begin(number)
    batch: Any = SimpleNamespace(rows=(8, 12), tokens=np.zeros((2, 2, 9)))
    clock.fed(batch)
    for stage in (1, 3):
        clock.enter("forward", stage)
        clock.enter("bubble")
    clock.end()


def test_steps_of_a_generation_reach_the_page(tmp_path: Path) -> None:
    page = make_page(tmp_path, "b", CPU, 60.0)
    clock = generation_clock(page, SPEC, 1, CPU)
    for number in (41, 42, 43, 44):
        step(clock, number)
    found = read_rows(tmp_path / "b.telemetry")
    assert found is not None
    assert [(row.term, row.n, row.rank, row.step, row.ordinal) for row in found.rows] == [
        (2, 3, 1, 42, 1),
        (2, 3, 1, 44, 3),
    ], "of a pipeline every other step"
    row = found.rows[-1]
    assert (row.rows, row.micro_batches, list(row.stage_s)) == (4, 2, [1, 3])
    assert sum(row.phase_s) == pytest.approx(row.step_s)
    assert row.row_s == pytest.approx(sum(row.stage_s.values()) * 2 / 4)
    assert row.memory.device == host_bytes() // 2, "two workers share the node"


def test_a_generation_counts_from_where_it_resumed(tmp_path: Path) -> None:
    page = make_page(tmp_path, "b", CPU, 60.0)
    for _ in range(2):
        step(generation_clock(page, SPEC, 0, CPU), 42)
    found = read_rows(tmp_path / "b.telemetry")
    assert found is not None
    assert [row.ordinal for row in found.rows] == [1, 1]


def test_null_measures_nothing(tmp_path: Path) -> None:
    assert make_page(tmp_path, "b", CPU, None) is None
    assert type(generation_clock(None, SPEC, 0, CPU)) is NoClock
    assert list(tmp_path.iterdir()) == []


def test_memory_of_a_cpu_worker_is_its_resident_set() -> None:
    before = DeviceMemory(CPU, 1)()
    assert 0 < before.allocated == before.reserved <= before.peak < before.device
    assert before.largest_free == before.device - before.reserved
    held = torch.ones(2**26)  # 256 MiB
    grown = DeviceMemory(CPU, 1)()
    assert grown.allocated > before.allocated + 2**27, held.shape


@pytest.mark.parametrize("busy_s", [0.0, 8.0])
def test_memory_is_read_no_more_often_than_its_cost_allows(
    monkeypatch: pytest.MonkeyPatch, busy_s: float
) -> None:
    """Its cost is the processor's: on a busy machine it stood still for ten seconds, and hid a leak."""
    clock, used, reads = [100.0], [0.0], []

    def read(memory: DeviceMemory, now: float) -> MemoryFigures:
        reads.append(now)
        clock[0] += 0.01 + busy_s
        used[0] += 0.01  # it took 10 ms
        return NO_MEMORY

    monkeypatch.setattr(module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(module.time, "thread_time", lambda: used[0])
    monkeypatch.setattr(DeviceMemory, "_read", read)
    memory = DeviceMemory(CPU, 1)
    while clock[0] < 125.0:
        memory()
        clock[0] += 0.1
    assert reads == pytest.approx([100.0, 110.01, 120.02], abs=0.2), "0.1 % of the time"
