"""Clocks and memory of a benchmark's process, with a CUDA device that notes what is asked of it."""

from __future__ import annotations

import ctypes
import gc
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from picotron_ray.bench.mfu import meters
from picotron_ray.bench.mfu.meters import (
    Clock,
    Stopwatch,
    peak_bytes,
    product_flops,
    reset_peak,
    stages_timed,
)
from picotron_ray.bench.recovery.peers.replica import Pace

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of torch.cuda, in order; event number n happens n² milliseconds after the first."""
    calls: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.at_ms = -1.0

        def record(self) -> None:
            self.at_ms = float(calls.count("record") ** 2)
            calls.append("record")

        def elapsed_time(self, after: Event) -> float:
            return after.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 77)
    return calls


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Moments that the clock gives one by one."""
    moments: list[float] = []
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", lambda: moments.pop(0))
        yield moments


def test_clock(noted: list[Any], now: list[float]) -> None:
    now += [1.0, 3.0, 3.5]
    clock = Clock(CPU)
    for _ in range(3):
        clock.mark()
    assert (clock.intervals(), noted) == ([2.0, 0.5], [])
    clock = Clock(CUDA)
    for _ in range(3):
        clock.mark()
    assert clock.intervals() == [0.001, 0.003]
    assert noted == ["record"] * 3 + ["synchronize"]


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_stopwatch(device: torch.device, noted: list[Any], now: list[float]) -> None:
    now += [1.0, 3.0, 3.5, 7.0]
    stopwatch = Stopwatch(device)
    for phase in ("data", "forward", "data", "end"):
        stopwatch.mark(phase)
    assert stopwatch.seconds == {"data": 2.0 + 3.5, "forward": 0.5}
    assert noted == (["synchronize"] * 4 if device.type == "cuda" else [])


def test_stages_mark_what_they_compute_and_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.pipelining import PipelineStage

    base = PipelineStage.__mro__[1]
    names = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
    for name in names:
        monkeypatch.setattr(base, name, lambda self, value, name=name: (name, value))
    marks: list[str] = []
    stopwatch = Stopwatch(CPU)
    monkeypatch.setattr(stopwatch, "mark", marks.append)
    stage = object.__new__(PipelineStage)
    with stages_timed(stopwatch):
        assert [getattr(stage, name)(value=3) for name in names] == [(name, 3) for name in names]
    assert marks == ["forward", "bubble", "backward", "bubble", "backward", "bubble"]
    assert not set(names) & set(vars(PipelineStage))
    assert stage.forward_one_chunk(4) == ("forward_one_chunk", 4)
    assert len(marks) == 6


class Owner:
    def __init__(self) -> None:
        self.itself = self


def test_peak_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    cycle = weakref.ref(Owner())
    trimmed, written = [], {}

    class Library:
        def malloc_trim(self, keep: int) -> None:
            trimmed.append(keep)

    gc.disable()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(ctypes, "CDLL", {None: Library()}.__getitem__)
            patched.setattr(Path, "write_text", lambda path, text: written.update({str(path): text}))
            reset_peak(CPU)
    finally:
        gc.enable()
    assert (trimmed, written) == ([0], {"/proc/self/clear_refs": "5"})
    assert cycle() is None
    status = "VmPeak:\t  9 kB\nVmHWM:\t  2048 kB\nVmRSS:\t 3 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: {"/proc/self/status": status}[str(path)])
    assert peak_bytes(CPU) == 2 * 2**20


def test_peak_on_cuda(noted: list[Any]) -> None:
    reset_peak(CUDA)
    assert noted == ["empty_cache", "reset_peak_memory_stats"]
    assert peak_bytes(CUDA) == 77


def test_the_fastest_product_after_a_first_one(monkeypatch: pytest.MonkeyPatch, now: list[float]) -> None:
    monkeypatch.setitem(meters.PRODUCT_SIZE, "cpu", 10)
    now += [0.0, 0.5, 4.5, 6.5, 9.5]  # the first is not counted
    assert product_flops(CPU, "bf16") == 2 * 10**3 / 2.0
    assert now == []


def test_pace_waits_for_what_is_left_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    moments, slept = [10.0, 10.25, 11.0, 13.0, 13.0], []
    monkeypatch.setattr(time, "monotonic", lambda: moments.pop(0))
    monkeypatch.setattr(time, "sleep", slept.append)
    pace = Pace(1.0)
    pace.wait()
    pace.wait()  # late already
    assert slept == [0.75, 0.0]
