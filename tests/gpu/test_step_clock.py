"""The clock of steps by CUDA events, and the memory of a device."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from picotron_ray.config.schema.telemetry import STEP_PHASES
from picotron_ray.runtime.worker.step_telemetry import DeviceMemory
from picotron_ray.train.step_clock import CUDA_EVERY, StepTimes, step_clock

DEVICE = torch.device("cuda", 0)
WORK = {"forward": 4, "backward": 8, "optimizer": 1}


def test_phases_are_the_devices_own_and_add_up() -> None:
    found: list[StepTimes] = []
    clock = step_clock(found.append, None, DEVICE)
    x = torch.randn(2048, 2048, device=DEVICE)
    batch: Any = SimpleNamespace(rows=(0, 4), tokens=np.zeros((2, 2, 9)))
    for step in range(4 * CUDA_EVERY + 2):
        clock.begin(step)
        clock.fed(batch)
        for phase, count in WORK.items():
            clock.enter(phase)
            for _ in range(count):
                x = torch.tanh(x @ x)
        clock.end()
        torch.cuda.synchronize()
    assert [times.step for times in found] == [CUDA_EVERY * n for n in range(5)]
    for times in found[1:]:
        phases = dict(zip(STEP_PHASES, times.phase_s, strict=True))
        assert sum(times.phase_s) == pytest.approx(times.step_s, rel=0.01)
        assert phases["backward"] > phases["forward"] > phases["optimizer"] > 0


def test_a_mark_waits_for_nothing() -> None:
    clock = step_clock(lambda times: None, None, DEVICE)
    x = torch.randn(8192, 8192, device=DEVICE)
    torch.cuda.synchronize()
    began = time.perf_counter()
    clock.begin(0)
    for _ in range(50):
        x = torch.tanh(x @ x)
    clock.enter("forward")
    clock.end()
    asked_s = time.perf_counter() - began
    torch.cuda.synchronize()
    assert asked_s < 0.5 * (time.perf_counter() - began)


def test_memory_is_the_allocators() -> None:
    held = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    found = DeviceMemory(DEVICE, 1)()
    assert 2**28 <= found.allocated <= found.reserved <= found.device
    assert found.peak >= found.allocated
    assert 0 < found.largest_free < found.device, held.shape
