"""Pages registered with CUDA by a runtime that is made up: what it is asked, and what a refusal becomes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from picotron_ray.train import page_locks as module
from picotron_ray.train.page_locks import CudaPageLocks, in_memory, page_locks

CUDA = torch.device("cuda", 3)


class Runtime:
    """CUDA's functions that are used, for a device whose number is looked at; refuses by ``errors``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.errors: list[int] = []
        self.device, self.kept = -1, 0
        cuda = SimpleNamespace(device=self.inside, cudart=lambda: self, CudaError=lambda code: f"code {code}")
        monkeypatch.setattr(module.torch, "cuda", cuda)
        monkeypatch.setattr(module.torch, "ones", self.launch)

    @contextlib.contextmanager
    def inside(self, device: torch.device) -> Iterator[None]:
        self.device = device.index
        yield
        self.device = -1

    def launch(self, *words: Any, device: torch.device) -> Any:
        assert device == CUDA
        kept, self.kept = self.kept, 0
        if kept:
            raise RuntimeError("CUDA error")
        return SimpleNamespace(neg_=lambda: None)

    def call(self, *words: Any) -> int:
        self.calls.append((*words, self.device))
        self.kept = self.errors.pop(0) if self.errors else 0
        return self.kept

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        return self.call("register", address, length, flags)

    def cudaHostUnregister(self, address: int) -> int:
        return self.call("unregister", address)


def test_memory_is_registered_for_the_devices_context_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, locks = Runtime(monkeypatch), CudaPageLocks(CUDA)
    assert locks.lock(4096, 1 << 20)
    locks.unlock(4096)
    assert runtime.calls == [("register", 4096, 1 << 20, 1, 3), ("unregister", 4096, 3)]


def test_a_refusal_is_one_line_and_no_later_launch_raises_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, locks = Runtime(monkeypatch), CudaPageLocks(CUDA)
    runtime.errors = [712]  # already registered
    with caplog.at_level(logging.WARNING):
        assert not locks.lock(4096, 3 << 20)
    assert runtime.kept == 0
    (line,) = (record.getMessage() for record in caplog.records)
    assert "code 712" in line
    assert "3 MiB" in line
    assert "ring" in line


FAILS = (
    ("cudart", RuntimeError("no driver")),
    ("cudart", AssertionError("not compiled with CUDA")),
    ("cudaHostRegister", AttributeError("gone")),
    ("CudaError", TypeError("takes no number")),
    ("returned", TypeError("no number")),
)


@pytest.mark.parametrize(("where", "error"), FAILS)
def test_an_error_of_torch_is_a_refusal(
    where: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, locks = Runtime(monkeypatch), CudaPageLocks(CUDA)

    def fails(*words: Any) -> Any:
        raise error

    if where == "returned":
        register = runtime.cudaHostRegister
        monkeypatch.setattr(runtime, "cudaHostRegister", lambda *words: (register(*words), "?")[1])
    elif where == "cudaHostRegister":
        monkeypatch.setattr(runtime, where, fails)
    else:
        monkeypatch.setattr(module.torch.cuda, where, fails)
    runtime.errors = [712] if where == "CudaError" else []
    with caplog.at_level(logging.WARNING):
        assert not locks.lock(4096, 1 << 20)
    assert "ring" in caplog.text
    if where == "returned":
        assert runtime.calls[-1] == ("unregister", 4096, 3), "nothing stays registered that nobody gives back"


def test_an_error_while_memory_is_given_back_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Runtime(monkeypatch)
    monkeypatch.setattr(module.torch.cuda, "cudart", lambda: None)
    with caplog.at_level(logging.WARNING):
        CudaPageLocks(CUDA).unlock(4096)
    assert "AttributeError" in caplog.text


def test_slots_on_a_disk_are_not_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "in_memory", lambda folder: False)
    with caplog.at_level(logging.WARNING):
        assert page_locks(CUDA, tmp_path) is None
    assert "ring" in caplog.text
    monkeypatch.setattr(module, "in_memory", lambda folder: True)
    assert isinstance(page_locks(CUDA, tmp_path), CudaPageLocks)
    assert page_locks(torch.device("cpu"), tmp_path) is None


def test_memory_file_systems_are_told_from_others() -> None:
    assert in_memory("/dev/shm")
    assert not in_memory("/proc")
