"""Memory pools on an emulated device: what is allocated from which, and a pool that does not fit.

On a real one: tests/gpu/test_memory_pools.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from picotron_ray.layout.layout import Layout
from picotron_ray.parallel.memory.pools import MemoryPools
from picotron_ray.train import engine as engine_module
from picotron_ray.train.engine import build_engine
from tests.gloo.parallel.memory.test_recompute import ROWS, job

CPU = torch.device("cpu")


class Device:
    """Pools of a device that is this CPU: which one is entered, and what was made in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int = 10**12) -> None:
        self.entered: list[str] = []
        self.made: dict[str, list[str]] = {}
        self._room, self._count = room, 0
        self._empty = torch.empty
        monkeypatch.setattr(torch.cuda, "MemPool", self._pool)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", self._use)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (room, 2 * room))
        monkeypatch.setattr(torch, "empty", self._made)

    def _pool(self) -> str:
        self._count += 1
        return f"pool {self._count}"

    @contextmanager
    def _use(self, pool: str, device: torch.device) -> Iterator[None]:
        self.entered.append(pool)
        try:
            yield
        finally:
            self.entered.pop()

    def _made(self, *sizes: Any, **options: Any) -> Any:
        if self.entered and sizes[0] > self._room:
            raise torch.OutOfMemoryError("out of memory")
        if self.entered:
            self.made.setdefault(self.entered[-1], []).append(f"{sizes[0]} bytes")
        return self._empty(1 if self.entered else sizes[0], **options)


def test_a_pool_is_filled_with_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    pools = MemoryPools(CPU, {"gradient": 5e6, "optimizer": 11e6, "activation": 99e6})
    assert device.made == {"pool 1": ["5000000 bytes"], "pool 2": ["11000000 bytes"]}
    assert pools.applied == ("memory pools: gradient 5 MB, optimizer 11 MB",)


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch, room=8 * 10**6)
    words = r"^memory.preallocate: saw 0.008 GB free of 0.016 GB, expected 0.011 GB for the class optimizer$"
    with pytest.raises(torch.OutOfMemoryError, match=words):
        MemoryPools(CPU, {"gradient": 5e6, "optimizer": 11e6})


def test_gradients_and_moments_are_made_within_their_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    device, entered = Device(monkeypatch), []
    for name in ("choose_passes", "build_optimizer"):
        inner = getattr(engine_module, name)

        def noted(*arguments: Any, inner: Any = inner, name: str = name) -> Any:
            entered.append((name, *device.entered))
            return inner(*arguments)

        monkeypatch.setattr(engine_module, name, noted)
    monkeypatch.setattr(torch, "empty", device._empty)  # the engine makes tensors of all kinds
    engine = build_engine(job(), Layout(micro_batch=ROWS), 0, None, CPU, pools=MemoryPools(CPU))
    assert entered == [("choose_passes", "pool 1"), ("build_optimizer", "pool 2")]
    assert "memory pools: gradient 0 MB, optimizer 0 MB" in engine.applied
    engine.close()


def test_without_a_device_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "MemPool", None)
    pools = MemoryPools()
    with pools.of("gradient"):
        torch.empty(4)
    assert pools.applied == ()
